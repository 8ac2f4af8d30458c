# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`Executor` on an NVIDIA GPU: the same calls, in order with torch's streams."""

from __future__ import annotations

import threading
from typing import Any

import executor_modules
import modules
import pytest
import torch
from executor_support import executor

import iree_marshal as im

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LONG = 20_000_000  # cycles of torch.cuda._sleep: about 10 ms


def on_gpu(program: str, *flags: str, **options: Any) -> im.Executor:
    return executor(program, *flags, *modules.CUDA, device="cuda", **options)


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32, device="cuda") + start).reshape(shape)


def test_new_known_and_bound_arguments() -> None:
    exe = on_gpu(executor_modules.ADD)
    a, b = numbers(4), numbers(4, start=10)
    for _ in range(3):
        assert torch.equal(exe(a, b), a + b)
    a.fill_(5)
    assert torch.equal(exe(a, b), a + b)
    exe.bind({1: b})
    for step in range(5):
        x = numbers(4, start=step)
        assert torch.equal(exe(x), x + b)


def test_inputs_are_complete_when_read() -> None:
    exe = on_gpu(executor_modules.ADD)
    zero = torch.zeros(4, device="cuda")
    x = torch.zeros(4, device="cuda")
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(side):
            for step in range(1, 6):
                torch.cuda._sleep(LONG)
                x.fill_(float(step))
                assert exe(x, zero).tolist() == [float(step)] * 4
        torch.cuda.synchronize()


def test_storage_arguments_and_out() -> None:
    exe = on_gpu(executor_modules.STORAGE_PAIR)
    a = numbers(16)
    first, second = exe(a)
    out = [torch.empty_like(first), torch.empty_like(second)]
    for step in range(5):
        x = numbers(16, start=step)
        results = exe(x, out=out)
        fresh = exe(x)
        for result, target, other in zip(results, out, fresh, strict=True):
            assert result.data_ptr() == target.data_ptr()
            assert torch.equal(result, other)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (first, second))


def test_out_waits_for_what_torch_still_does_with_it() -> None:
    """IREE writes into memory that torch's stream is still reading: the call must come after."""
    exe = on_gpu(executor_modules.STORAGE_PAIR)
    out = list(exe(numbers(16)))
    before = [tensor.clone() for tensor in out]
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    copies = [tensor.clone() for tensor in out]
    exe(numbers(16, start=100), out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(copy, old) for copy, old in zip(copies, before, strict=True))


def test_wrong_devices() -> None:
    exe = on_gpu(executor_modules.ADD)
    with pytest.raises(ValueError, match=r"upload=True"):
        exe(numbers(4), torch.zeros(4))
    up = on_gpu(executor_modules.ADD, upload=True)
    for step in range(100):
        assert up(torch.full((4,), float(step)), numbers(4)).tolist() == [step, step + 1, step + 2, step + 3]


def test_submit() -> None:
    exe = on_gpu(executor_modules.ADD, executor_modules.FENCES)
    pending = []
    for step in range(16):
        x = numbers(4, start=step)
        pending.append((step, exe.submit(x, numbers(4))))
        del x
        torch.full((4,), -1.0, device="cuda")
    for step, call in pending:
        assert call.result().tolist() == [2 * index + step for index in range(4)]


def test_threads_with_streams_of_their_own() -> None:
    exe = on_gpu(executor_modules.ADD)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(100):
                    x = torch.full((4,), float(seed * 1000 + step), device="cuda")
                    y = exe(x, x)
                    assert y.tolist() == [2.0 * (seed * 1000 + step)] * 4
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
