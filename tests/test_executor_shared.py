# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Results in one allocation of IREE's: exported once, handed out as parts of one storage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import executor_modules as programs
import modules
import torch
from executor_support import BOTH_PATHS, aligned, executor, live


def expected_of_many(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + x, x.long(), x * x, x.char(), 2 * x.long()]


def test_results_of_one_allocation_share_one_storage() -> None:
    exe = executor(programs.MANY_RESULTS)
    before = live()
    x = aligned(5)
    results = exe(x)
    for result, expected in zip(results, expected_of_many(x), strict=True):
        assert type(result) is torch.Tensor
        assert result.dtype == expected.dtype
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)
    # One holding for each dtype, whatever the number of results.
    exe.trim()
    assert [now - then for now, then in zip(live(), before, strict=True)] == [0, 3, 0]
    by_dtype = {result.dtype: result.untyped_storage() for result in results}
    assert len({storage.data_ptr() for storage in by_dtype.values()}) == 1
    for result in results:
        storage = result.untyped_storage()
        assert storage.data_ptr() == by_dtype[result.dtype].data_ptr()
        assert storage.data_ptr() <= result.data_ptr()
        assert result.data_ptr() + result.nbytes <= storage.data_ptr() + storage.nbytes()
    del by_dtype, storage, result


def test_allocation_goes_with_its_last_part() -> None:
    exe = executor(programs.MANY_RESULTS)
    before = live()
    held = [exe(aligned(5, start=number)) for number in range(10)]
    last = [results[number % 5] for number, results in enumerate(held)]
    exe.trim()
    del held
    assert live()[1] - before[1] == 10
    for number, result in enumerate(last):
        assert torch.equal(result, expected_of_many(aligned(5, start=number))[number % 5])
    del last, result
    assert live() == before


def test_parts_may_be_written_and_trained_on() -> None:
    exe = executor(programs.MANY_RESULTS)
    double, _, square, *_ = exe(aligned(5))
    kept = square.clone()
    double.fill_(-1.0)
    assert torch.equal(square, kept)
    assert square._version == 0
    square.requires_grad_()
    (square * 3).sum().backward()
    assert square.grad is not None
    assert square.grad.tolist() == [3.0] * 5


@BOTH_PATHS
def test_argument_handed_out_twice_is_the_argument(path: str) -> None:
    exe = executor(programs.TWICE, path=path)
    x = aligned(4)
    first, second = exe(x)
    assert first.data_ptr() == second.data_ptr() == x.data_ptr()
    assert first.shape == second.shape == x.shape


def test_single_result_has_a_storage_of_its_own_size() -> None:
    a = aligned(4)
    result = executor(programs.ADD)(a, a)
    assert result.untyped_storage().nbytes() == result.nbytes


def test_parts_without_the_c_shim(tmp_path: Path) -> None:
    """Where torch's C shim is not used, `as_strided` makes the same parts."""
    text = """
import torch, iree_marshal as im, sys
from torch._subclasses import FakeTensorMode
exe = im.Executor.load(sys.argv[1])
x, y = torch.arange(5.0), torch.arange(4.0)
with FakeTensorMode():
    results = exe(x)
    stored = im.Executor.load(sys.argv[2])(y)
assert torch.equal(stored[0], y + y) and torch.equal(stored[1], (y + y).int()), stored
for result, expected in zip(results, [x + x, x.long(), x * x, x.char(), 2 * x.long()], strict=True):
    assert torch.equal(result, expected) and result.stride() == (1,), result
assert len({result.untyped_storage().data_ptr() for result in results}) == 1
results[0].add_(1)
assert results[2]._version == 0
"""
    module = tmp_path / "many.vmfb"
    module.write_bytes(modules.compile_module(programs.MANY_RESULTS))
    storage = tmp_path / "storage.vmfb"
    storage.write_bytes(modules.compile_module(programs.STORAGE_BUFFER))
    environment = os.environ | {"IREE_MARSHAL_TORCH_READER": "dlpack"}
    done = subprocess.run(
        [sys.executable, "-c", text, str(module), str(storage)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
