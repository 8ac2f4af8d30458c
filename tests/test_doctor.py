# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`python -m iree_marshal doctor`, and the command line around it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import iree_marshal
from iree_marshal import __main__ as command_line
from iree_marshal import devices, doctor, paths, selfcheck
from iree_marshal.proofs import READS
from iree_marshal.proofs_by_call import CALLS

BROKEN = selfcheck.Report(
    (selfcheck.Proof("platform", True, "fine"), selfcheck.Proof("views", False, "rank 7 of (4, 3)")), 1.0, "3.99.0"
)


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not used the package yet."""
    monkeypatch.delenv("IREE_MARSHAL_PATH", raising=False)
    for name in ("_active", "_status", "_proven"):
        monkeypatch.setattr(paths, name, None)


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_proven_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = as_json(capsys)
    assert found["path"]["active"] == "fast"
    assert [proof["ok"] for proof in found["proofs"]] == [True] * (len(READS) + len(CALLS))
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["iree_marshal"] == iree_marshal.__version__
    assert found["versions"]["IREE runtime"] == selfcheck.runtime_version()
    assert found["devices"]["cpu"] == "local-task"
    assert "torch reader" in found["native"]


def test_the_table_has_every_proof_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert text.count(" ok ") == len(READS) + len(CALLS)
    assert "FAILED" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    for word in ("versions", "platform", "proofs", "path", "devices", "native", "local-task", selfcheck.supported()):
        assert word in text.replace("\n" + " " * 17, " ")


def test_a_runtime_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selfcheck, "prove", lambda: BROKEN)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "FAILED  rank 7 of (4, 3)" in text
    assert "views: rank 7 of (4, 3)" in text
    assert "portable" in text
    assert "torch reader" not in text


def test_the_portable_path_by_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", "portable")
    assert doctor.main(["--json"]) == 1
    found = as_json(capsys)
    assert (found["path"]["active"], found["path"]["why"]) == ("portable", "IREE_MARSHAL_PATH=portable")
    # The proofs are shown all the same.
    assert all(proof["ok"] for proof in found["proofs"])


def test_a_demand_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", "fast")
    monkeypatch.setattr(selfcheck, "prove", lambda: BROKEN)
    assert doctor.main(["--json"]) == 1
    assert as_json(capsys)["path"]["active"] == "none"


def test_a_bad_choice_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", "quick")
    assert doctor.main(["--json"]) == 1
    assert as_json(capsys)["path"]["why"] == "IREE_MARSHAL_PATH: expected one of fast, portable, auto, got 'quick'"


def test_a_gpu_without_an_iree_device_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Properties:
        name = "A GPU"
        uuid = "1234-abcd"

    def refuse(device: torch.device) -> None:
        raise ValueError(f"IREE's cuda driver sees no device of {device}")

    genuine = devices.hal_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(
        devices, "hal_device", lambda device: genuine(device) if device.type == "cpu" else refuse(device)
    )
    assert doctor.main(["--json"]) == 0
    assert as_json(capsys)["devices"] == {
        "cpu": "local-task",
        "cuda:0": "no IREE device: ValueError: IREE's cuda driver sees no device of cuda:0 (A GPU, UUID 1234-abcd)",
    }


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    monkeypatch.setattr(selfcheck, "runtime_version", lambda: "")
    found = doctor._versions()
    assert (found["IREE compiler"], found["IREE runtime"]) == ("not installed", "unknown version")


# ---- python -m iree_marshal ----------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(arguments) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("demo", "doctor", "bench"))


@pytest.mark.parametrize(("arguments", "problem"), [([], "usage"), (["dcotor"], "unknown command 'dcotor'")])
def test_no_such_command(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(arguments) == 2
    assert capsys.readouterr().err.startswith(problem)


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main([name, "--help"])
    assert left.value.code == 0
    assert f"python -m iree_marshal {name}" in capsys.readouterr().out


def test_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "iree_marshal", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"]["active"] == "fast"
