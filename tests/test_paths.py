# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which path is taken, when that is decided, and what is said about it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import iree_marshal
from iree_marshal import native, paths, portable, selfcheck

BROKEN = selfcheck.Report((selfcheck.Proof("views", False, "rank 7 of (4, 3)"),), 1.0, "3.99.0")


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not used the package yet."""
    monkeypatch.delenv("IREE_MARSHAL_PATH", raising=False)
    for name in ("_active", "_status", "_proven"):
        monkeypatch.setattr(paths, name, None)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each self-check."""
    made: list[None] = []
    genuine = selfcheck.prove

    def counted() -> selfcheck.Report:
        made.append(None)
        return genuine()

    monkeypatch.setattr(selfcheck, "prove", counted)
    return made


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that does not pass."""
    monkeypatch.setattr(selfcheck, "prove", lambda: BROKEN)


@pytest.mark.parametrize("choice", [None, "", "auto", "fast"])
def test_a_proven_runtime_runs_natively(
    choice: str | None, checks: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice is not None:
        monkeypatch.setenv("IREE_MARSHAL_PATH", choice)
    assert paths.active() is native
    assert paths.active() is native
    status = paths.status()
    assert (status.path, len(checks)) == ("fast", 1)
    assert status.report is not None
    assert status.report.ok
    assert selfcheck.runtime_version() in status.why


def test_portable_needs_no_self_check(checks: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", "portable")
    assert paths.active() is portable
    assert paths.status() == paths.PathStatus("portable", "IREE_MARSHAL_PATH=portable", None)
    assert checks == []


@pytest.mark.parametrize("choice", ["Fast", "native", "0"])
def test_another_choice_is_refused_each_time(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", choice)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"IREE_MARSHAL_PATH: expected one of fast, portable, auto, got '{choice}'"
        ):
            paths.active()
        with pytest.raises(ValueError, match="IREE_MARSHAL_PATH"):
            paths.status()
    monkeypatch.setenv("IREE_MARSHAL_PATH", "portable")
    assert paths.active() is portable


def test_auto_falls_back_with_one_warning(broken: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            (result,) = iree_marshal.from_variant_list(iree_marshal.to_variant_list([torch.arange(16.0)]))
            assert torch.equal(result, torch.arange(16.0))
    (warning,) = caught
    assert warning.category is RuntimeWarning
    # At the line that used the package.
    assert warning.filename == __file__
    text = str(warning.message)
    for part in (
        "iree-base-runtime 3.99.0 (views: rank 7 of (4, 3))",
        "Supported: iree-base-runtime 3.4.0 to 3.13.0",
        "IREE_MARSHAL_PATH=portable",
        "python -m iree_marshal doctor",
        "Using the portable path",
    ):
        assert part in text
    assert paths.status() == paths.PathStatus("portable", BROKEN.failure, BROKEN)


def test_a_warning_made_an_error_is_raised_once(broken: None) -> None:
    with pytest.raises(RuntimeWarning, match="Using the portable path"):
        paths.active()
    assert paths.active() is portable


def test_fast_on_an_unproven_runtime_raises(broken: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_MARSHAL_PATH", "fast")
    for _ in range(2):
        with pytest.raises(iree_marshal.UnsupportedRuntimeError, match=r"3\.99\.0 \(views: rank 7"):
            iree_marshal.to_variant_list([1])
    assert paths.status() == paths.PathStatus("none", BROKEN.failure, BROKEN)


def test_a_native_path_that_cannot_be_opened_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(native, "arm", fail)
    with pytest.warns(RuntimeWarning, match="opening the native path: RuntimeError: no room"):
        assert paths.active() is portable


def test_force_takes_a_path_and_gives_it_back() -> None:
    with paths.force("portable") as outer:
        assert paths.active() is outer is portable
        with paths.force("fast") as inner:
            assert paths.active() is inner is native
        assert paths.active() is portable
        with pytest.raises(KeyError), paths.force("fast"):
            raise KeyError
        assert paths.active() is portable
    assert paths.active() is native


def test_force_refuses_what_is_not_proven(broken: None) -> None:
    with pytest.raises(iree_marshal.UnsupportedRuntimeError), paths.force("fast"):
        pass
    with pytest.raises(ValueError, match="expected 'fast' or 'portable', got 'auto'"), paths.force("auto"):
        pass


def test_import_decides_nothing_and_eight_threads_decide_once() -> None:
    code = """
import sys, threading
import torch, iree_marshal as im
from iree_marshal import paths, selfcheck

assert paths._active is None and paths._proven is None
assert "iree_marshal.proofs" not in sys.modules and "iree_marshal._probe" not in sys.modules
genuine, made = selfcheck.prove, []
def counted():
    made.append(None)
    return genuine()
selfcheck.prove = counted
results, barrier = [], threading.Barrier(8)
def use():
    barrier.wait()
    (result,) = im.from_variant_list(im.to_variant_list([torch.ones(16)]))
    results.append((paths.active().__name__, result.sum().item()))
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert results == [("iree_marshal.native", 16.0)] * 8, results
assert len(made) == 1, made
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
