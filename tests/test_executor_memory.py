# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory over many calls, what is told about it, times, and arguments that a call changes."""

from __future__ import annotations

import warnings
from typing import Any

import executor_modules as modules
import pytest
import releases
import torch
from executor_support import BOTH_PATHS, aligned, executor, live, resident_bytes

import iree_marshal as im
from iree_marshal import _spares, memory, paths
from iree_marshal.calling import Timing
from iree_marshal.inputs import InputChangedWarning


def test_ten_thousand_calls_with_changing_shapes() -> None:
    exe = executor(modules.DYNAMIC)

    def calls(count: int) -> None:
        for number in range(count):
            rows = 1 + number * 37 % 997
            x = torch.full((rows, 4), float(number % 100))
            y = exe(x)
            assert y.shape == (rows, 4)
            assert y[rows - 1, 3] == 2 * (number % 100)

    before = live()
    calls(1000)
    exe.trim()
    resident = resident_bytes()
    calls(10_000)
    exe.trim()
    assert live() == before
    # 10 000 calls of 8 KB on average each way; half a megabyte is noise of the allocator.
    assert resident_bytes() - resident < 2 * 2**20


@pytest.mark.parametrize("program", ["ADD", "STORAGE_BUFFER", "ASSERTING"])
def test_failing_calls_keep_nothing(program: str) -> None:
    exe = executor(getattr(modules, program))
    x = torch.ones(4)

    def failing() -> None:
        if program == "ADD":
            exe(x, torch.zeros(5))
        elif program == "STORAGE_BUFFER":
            exe(x, out=[torch.zeros(4), x])
        else:
            exe(x, 0)

    def calls(count: int) -> None:
        for _ in range(count):
            with pytest.raises(Exception, match=r"expected|n must be 1"):
                failing()

    before = live()
    calls(200)
    resident = resident_bytes()
    calls(3000)
    assert live() == before
    assert resident_bytes() - resident < 2 * 2**20


def test_bookkeeping_stays_small_when_arguments_change_one_by_one() -> None:
    # Each position keeps its block alive: a block must be no larger than what was imported in that call.
    exe = executor(modules.ADD)
    kept = [aligned(4), aligned(4)]
    exe(*kept)
    before = live()[2]
    for number in range(50):
        kept[number % 2] = aligned(4, start=number)
        exe(*kept)
    assert live()[2] <= before + 1


def test_memory_kept_for_the_next_call_is_bounded_and_goes_with_trim() -> None:
    exe = executor(modules.ADD)
    for count in (1, 40, 400, 40, 4000, 7, 400, 40_000):
        tensors = [aligned(4, 4) for _ in range(count)]
        for tensor in im.from_variant_list(im.to_variant_list(tensors)):
            assert tensor.data_ptr()
    live()
    assert _spares.spare_bytes() <= 4 * 256 * 1024
    exe.trim()
    assert _spares.spare_bytes() == 0


def test_memory_stats() -> None:
    before = memory.memory_stats()["cpu"]
    exe = executor(modules.ADD)
    x, one = torch.ones(4), torch.zeros(4)
    y = exe(x, one)
    now = memory.memory_stats()["cpu"]
    assert now["imports"] - before["imports"] == 2
    assert now["import_bytes"] - before["import_bytes"] == 32
    assert now["exports"] - before["exports"] == 1
    assert now["export_bytes"] - before["export_bytes"] == 16
    assert now["torch"] == {}
    assert now["iree"]
    assert all(isinstance(value, int) for value in now["iree"].values())
    del y
    exe.trim()
    after = memory.memory_stats()["cpu"]
    assert {key: after[key] for key in ("imports", "import_bytes", "exports", "export_bytes")} == {
        key: before[key] for key in ("imports", "import_bytes", "exports", "export_bytes")
    }


def test_memory_stats_of_the_portable_path() -> None:
    executor(modules.ADD)(torch.ones(4), torch.ones(4))
    with paths.force("portable"):
        stats = memory.memory_stats()["cpu"]
    assert stats["imports"] is None
    assert stats["export_bytes"] is None
    assert stats["iree"]


# ---- times -------------------------------------------------------------------------------------------


@BOTH_PATHS
def test_timing(path: str) -> None:
    exe = executor(modules.TORCH_ADD, path=path, signature=modules.TORCH_ADD_SIGNATURE)
    assert exe.timing is False
    exe(torch.ones(4), torch.ones(4))
    assert exe.last_timing is None
    exe.timing = True
    exe(torch.ones(4), torch.ones(4))
    timing = exe.last_timing
    assert isinstance(timing, Timing)
    assert min(timing.marshal_in, timing.invoke, timing.marshal_out) > 0
    assert timing.order >= 0
    assert timing.invoke < 10**9
    exe.timing = False
    exe(torch.ones(4), torch.ones(4))
    assert exe.last_timing is timing
    assert executor(modules.ADD, path=path, timing=True).timing is True


# ---- arguments that a call changes --------------------------------------------------------------------


def accumulate(monkeypatch: pytest.MonkeyPatch, path: str, on: str = "1", **options: Any) -> Any:
    monkeypatch.setenv("IREE_MARSHAL_CHECK_INPUTS", on)
    return executor(modules.ACCUMULATE, path=path, **options)


@BOTH_PATHS
@releases.WRITES_INTO_ARGUMENTS
def test_changed_arguments_are_reported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = accumulate(monkeypatch, path)
    a, b, total = aligned(4, 4), torch.eye(4), torch.ones(4, 4)
    message = r"^the call of main changed the bytes of argument 2 \(input2\); pass copy=True to protect arguments$"
    with pytest.warns(InputChangedWarning, match=message) as caught:
        result = exe(a, b, total)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(result, a + 1)
    assert torch.equal(total, a + 1)
    with pytest.warns(InputChangedWarning, match=message):
        exe.submit(a, b, total).result()
    exe.bind({2: total})
    with pytest.warns(InputChangedWarning, match=message):
        exe(a, b)


@BOTH_PATHS
@releases.WRITES_INTO_ARGUMENTS
def test_unchanged_and_protected_arguments_are_not_reported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, total = aligned(4, 4), torch.eye(4), torch.ones(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        protected = accumulate(monkeypatch, path, copy=True)
        assert torch.equal(protected(a, b, total), a + 1)
        assert torch.equal(total, torch.ones(4, 4))
        quiet = executor(modules.ADD, path=path)
        quiet(aligned(4), aligned(4))
        with pytest.raises(TypeError, match=r"^expected 2 arguments"):
            quiet(aligned(4))
        # Off, nothing is said; and the argument is changed, as documented.
        exe = accumulate(monkeypatch, path, on="0")
        exe(a, b, total)
    assert torch.equal(total, a + 1)
