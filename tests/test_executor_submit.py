# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls under way: entries with fences, and worker threads for all others."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import executor_modules as modules
import iree.runtime as rt
import pytest
import releases
import torch
from executor_support import BOTH_PATHS, aligned, executor, live

from iree_marshal import devices, loading, paths
from iree_marshal.executor import Executor
from iree_marshal.pending import FencePending, Pending, ThreadPending

pytestmark = BOTH_PATHS


def gated(exe: Executor) -> rt.HalFence:
    """Make IREE wait for a fence before it starts the work of any later `submit`."""
    if releases.WAITS_WITHIN_INVOCATION:
        pytest.skip("IREE before 3.12 waits within the invocation for the fence that lets the work begin")
    gate = rt.HalFence.create_at(exe._hal_device.create_semaphore(0), 1)
    exe._ready = gate
    return gate


def async_entries(path: str) -> list[Executor]:
    return [
        executor(modules.ADD, modules.FENCES, path=path),
        executor(modules.TORCH_ADD, path=path),
        executor(modules.TORCH_ADD, path=path, signature=modules.TORCH_ADD_SIGNATURE),
    ]


def test_entry_with_fences_returns_at_once(path: str) -> None:
    for exe in async_entries(path):
        gate = gated(exe)
        x, one = aligned(4), torch.ones(4)
        pending = exe.submit(x, one)
        assert isinstance(pending, FencePending)
        assert not pending.done()
        assert repr(pending) == "<Pending running>"
        with pytest.raises(TimeoutError, match=r"^the call is not done after 0.01 s$"):
            pending.result(timeout=0.01)
        gate.signal()
        y = pending.result()
        assert torch.equal(y, x + 1)
        assert pending.done()
        assert repr(pending) == "<Pending done>"
        assert pending.result() is y
        assert pending.result(timeout=0) is y


def test_call_of_an_entry_with_fences_waits(path: str) -> None:
    exe = executor(modules.ADD, modules.FENCES, path=path)
    assert exe.signature is not None
    assert exe.signature.fences
    for number in range(3):
        assert torch.equal(exe(aligned(4, start=number), aligned(4)), aligned(4, start=number) + aligned(4))
    with pytest.raises(TypeError, match=r"^expected 2 arguments"):
        exe(aligned(4))


def test_storage_of_an_entry_with_fences(path: str) -> None:
    exe = executor(modules.STORAGE_BUFFER, modules.FENCES, path=path)
    out = [torch.zeros(4), torch.zeros(4, dtype=torch.int32)]
    gate = gated(exe)
    first, second = exe.submit(aligned(4)), exe.submit(aligned(4, start=1), out=out)
    gate.signal()
    assert torch.equal(first.result()[0], aligned(4) * 2)
    assert second.result()[0] is out[0]
    assert torch.equal(out[0], aligned(4, start=1) * 2)


def test_inputs_are_kept_until_the_signal(path: str) -> None:
    exe = executor(modules.ADD, modules.FENCES, path=path)
    gate = gated(exe)
    x = aligned(4)
    one = torch.ones(4)
    references = sys.getrefcount(one)
    pending = exe.submit(x, one)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is not None or path == "portable"
    noise = [torch.full((4,), -7.0) for _ in range(100)]
    gate.signal()
    assert torch.equal(pending.result(), aligned(4) + 1)
    exe.trim()
    del pending, noise
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(one) == references


def test_many_in_flight(path: str) -> None:
    for exe in async_entries(path):
        before = live()
        gate = gated(exe)
        one = torch.ones(4)
        pending = [exe.submit(aligned(4, start=number), one) for number in range(50)]
        assert not any(entry.done() for entry in pending)
        gate.signal()
        for number, entry in reversed(list(enumerate(pending))):
            assert torch.equal(entry.result(), aligned(4, start=number) + 1)
        del pending, entry
        exe.trim()
        wait_for(lambda before=before: live() == before)


def wait_for(condition: Any) -> None:
    """IREE lets go of buffers on its own threads, a little after the signal."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pending_that_nobody_asks(path: str) -> None:
    exe = executor(modules.ADD, modules.FENCES, path=path)
    before = live()
    gate = gated(exe)
    pending = exe.submit(aligned(4), aligned(4))
    del pending
    gc.collect()
    noise = [torch.full((4,), -7.0) for _ in range(100)]
    gate.signal()
    del exe, noise
    wait_for(lambda: live() == before)


def test_failure_of_the_work_is_delivered(path: str) -> None:
    exe = executor(modules.ADD, modules.FENCES, path=path)
    gate = gated(exe)
    pending = exe.submit(aligned(4), aligned(4))
    gate.fail("no power")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no power"):
            pending.result()
    assert pending.done()
    exe._ready = None
    assert torch.equal(exe.submit(aligned(4), aligned(4)).result(), aligned(4) * 2)


def test_refusals_come_at_once(path: str) -> None:
    for exe in (*async_entries(path)[::2], executor(modules.ADD, path=path)):
        with pytest.raises(ValueError, match=r"expected tensor<4xf32>, got a tensor of shape \(3,\)"):
            exe.submit(torch.zeros(3), torch.ones(4))
        with pytest.raises(TypeError, match=r"^expected 2 arguments"):
            exe.submit()
        assert torch.equal(exe.submit(torch.ones(4), torch.ones(4)).result(), torch.full((4,), 2.0))


def test_asked_by_many_threads(path: str) -> None:
    exe = executor(modules.ADD, modules.FENCES, path=path)
    gate = gated(exe)
    pending = exe.submit(aligned(4), aligned(4))
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(pending.result())) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.signal()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(tensor is found[0] for tensor in found)


def test_bound_arguments_hold_for_both_entries(path: str) -> None:
    exe = executor(modules.TORCH_ADD, path=path, signature=modules.TORCH_ADD_SIGNATURE)
    exe.bind({1: torch.ones(4)})
    assert torch.equal(exe(aligned(4)), aligned(4) + 1)
    assert torch.equal(exe.submit(aligned(4)).result(), aligned(4) + 1)
    exe.unbind()
    assert torch.equal(exe.submit(aligned(4), aligned(4)).result(), aligned(4) * 2)


# ---- worker threads -----------------------------------------------------------------------------------


def test_function_without_fences_runs_on_a_worker(path: str) -> None:
    exe = executor(modules.SLOW, path=path)
    x = torch.eye(512) * 1.0
    begun = time.perf_counter()
    pending = exe.submit(x)
    returned = time.perf_counter() - begun
    assert isinstance(pending, ThreadPending)
    result = pending.result()
    finished = time.perf_counter() - begun
    assert returned < finished / 2
    assert torch.equal(result, x)
    assert pending.done()
    assert pending.result() is result


def test_worker_runs_in_order_and_delivers_failures(path: str) -> None:
    counter = executor(modules.COUNTER, path=path)
    pending = [counter.submit() for _ in range(20)]
    assert [entry.result() for entry in pending] == list(range(1, 21))
    exe = executor(modules.ASSERTING, path=path)
    x = aligned(4)
    entries: list[Pending] = [exe.submit(x, number) for number in (1, 2, 1)]
    assert torch.equal(entries[0].result(), x * 2)
    with pytest.raises(Exception, match="n must be 1"):
        entries[1].result()
    assert torch.equal(entries[2].result(), x * 2)


def test_worker_timeout(path: str) -> None:
    exe = executor(modules.SLOW, path=path)
    pending = exe.submit(torch.eye(512))
    with pytest.raises(TimeoutError, match=r"^the call is not done after 0 s$"):
        pending.result(timeout=0)
    pending.result(timeout=60)


def test_worker_results_into_the_callers_memory(path: str) -> None:
    exe = executor(modules.STORAGE_BUFFER, path=path)
    out = [torch.zeros(4), torch.zeros(4, dtype=torch.int32)]
    first, second = exe.submit(aligned(4)), exe.submit(aligned(4, start=1), out=out)
    assert torch.equal(first.result()[0], aligned(4) * 2)
    assert second.result()[1] is out[1]
    assert torch.equal(out[1], (aligned(4, start=1) * 2).int())


def test_async_function_that_takes_no_fences(path: str) -> None:
    with paths.force("fast" if path == "native" else "portable"):
        context, module = loading.load_context(modules.compiled(modules.ADD), devices.hal_device("cpu"), None)
        entry, _ = loading.function_of(module, "main")
        exe = Executor(context, entry, device="cpu", async_function=entry)
    tensor = aligned(4)
    with pytest.raises(ValueError, match="function mismatch"):
        exe.submit(tensor, tensor)
    assert torch.equal(exe(tensor, tensor), 2 * tensor)
