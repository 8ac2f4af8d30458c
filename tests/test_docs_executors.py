# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs every block of ``docs/custom-executors.md``, and compares what it prints with the comments there."""

from __future__ import annotations

import re
from pathlib import Path

import executor_modules as modules
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "custom-executors.md"


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    programs = [text for kind, text in blocks if kind == "mlir"]
    for name, program in zip(("program.vmfb", "storage.vmfb"), programs, strict=True):
        (tmp_path / name).write_bytes(modules.compiled(program))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    expected = []
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), namespace)
            expected += re.findall(r"^ *# ((?:sync func|argument \d).*)$", text, re.MULTILINE)
    assert len(expected) == 2
    assert capsys.readouterr().out.splitlines() == expected
