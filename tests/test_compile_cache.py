# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The disk cache of compiled modules: hits, damage, bounds, and several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiling import compile_

from iree_marshal.backend import cache, pipeline
from iree_marshal.backend.cache import Cache

_SCRIPT = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("iree_marshal.compile").setLevel(logging.DEBUG)
from iree_marshal import backend
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
x = torch.randn(4, 16)
with torch.no_grad():
    ours = torch.compile(model, backend=backend.register(), options={"fallback": False})(x)
    torch.testing.assert_close(ours, model(x))
print("right")
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "IREE_MARSHAL_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _finish(*processes: subprocess.Popen[str]) -> list[str]:
    # All of them are waited for before one is judged: none may outlive a failed test.
    ended = [(process.communicate(timeout=240), process.returncode) for process in processes]
    for (output, errors), status in ended:
        assert status == 0, errors
        assert "right" in output
    return [output for (output, _), _ in ended]


def test_two_processes_at_once_compile_once_and_a_third_not_at_all(tmp_path: Path) -> None:
    outputs = _finish(_start(tmp_path), _start(tmp_path))
    assert sorted(output.count(": compiled") for output in outputs) == [0, 1]
    assert sum(output.count(": found in the cache") for output in outputs) == 1
    assert len(list(tmp_path.glob("*.vmfb"))) == 1
    (later,) = _finish(_start(tmp_path))
    assert ": compiled" not in later
    assert "iree-compile" not in later


def test_a_damaged_entry_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    x = torch.randn(5)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 5 - 1

    compile_(function)(x)
    (entry,) = tmp_path.glob("*.vmfb")
    whole = entry.read_bytes()
    for damaged in (whole[:-1], b"", b"x" * len(whole), whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        entry.write_bytes(damaged)
        torch.testing.assert_close(compile_(function)(x), function(x))
        assert entry.read_bytes()[-40:] == whole[-40:]


def test_an_entry_that_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    held = Cache(tmp_path, limit=10_000)
    held.write("a", b"of another runtime")

    def check(module: bytes) -> None:
        if module != b"right":
            raise ValueError("bad module")

    assert held.get("a", lambda: b"right", check) == (b"right", False)
    assert held.get("a", lambda: b"unused", check) == (b"right", True)
    with pytest.raises(ValueError, match="bad module"):
        held.get("b", lambda: b"wrong", check)
    assert held.read("b") is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    held = Cache(tmp_path, limit=3500)
    for place, name in enumerate("abc"):
        held.write(name, b"m" * 1000)
        os.utime(tmp_path / f"{name}.vmfb", (1000 + place, 1000 + place))
    assert held.read("a") is not None  # used now: "b" is the oldest
    held.write("d", b"m" * 1000)
    assert [name for name in "abcd" if held.read(name) is not None] == ["a", "c", "d"]
    held.write("e", b"m" * 5000)
    assert [name for name in "abcde" if held.read(name) is not None] == ["e"]


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    for name in ("x.part", "y.lock"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / "fresh.part").write_bytes(b"")
    Cache(tmp_path, limit=100).write("a", b"m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.vmfb", "fresh.part"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    held = Cache(blocked / "cache", limit=100)
    assert held.get("a", lambda: b"m", lambda module: None) == (b"m", False)
    assert "cannot keep a compiled module" in caplog.text


def test_the_key_covers_program_flags_and_versions() -> None:
    keys = {
        cache.key("p", ["a", "b"]),
        cache.key("q", ["a", "b"]),
        cache.key("p", ["ab"]),
        cache.key("p", ["a", "c"]),
        cache.key("p", ["a", "b", ""]),
    }
    assert len(keys) == 5


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IREE_MARSHAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "iree_marshal"
    monkeypatch.setenv("IREE_MARSHAL_CACHE_MB", "1.5")
    assert cache.limit_bytes() == 1_572_864


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    compile_(lambda x: x + 2, cache=False)(torch.randn(3))
    assert not list(tmp_path.iterdir())
    assert pipeline.__version__
