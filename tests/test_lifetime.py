# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Who keeps whose memory alive, shown by counters: nothing lost, nothing leaked, on every way a call can end."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import iree.runtime as rt
import modules
import pytest
import torch
from conftest import alive, private_device

import iree_marshal as im
from iree_marshal import _importing, _lifetime

pytestmark = pytest.mark.usefixtures("nothing_left")


def counts_of(tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def test_list_keeps_its_tensors() -> None:
    tensors = [torch.ones(16) for _ in range(5)]
    before = counts_of(tensors)
    variants = im.to_variant_list(tensors)
    assert counts_of(tensors) == [count + 1 for count in before]
    assert alive() == (5, 0, 1)
    del variants
    assert counts_of(tensors) == before


def test_list_alone_keeps_memory_alive() -> None:
    tensor = torch.full((16,), 7.0)
    alive = weakref.ref(tensor)
    variants = im.to_variant_list([tensor])
    del tensor
    gc.collect()
    assert alive() is not None
    assert torch.equal(im.from_variant_list(variants)[0], torch.full((16,), 7.0))
    del variants
    gc.collect()
    assert alive() is None


def test_results_keep_their_buffers() -> None:
    variants = im.to_variant_list([torch.full((16,), 3.0)])
    (result,) = im.from_variant_list(variants)
    (array,) = im.from_variant_list(variants, as_arrays=True)
    del variants
    assert alive() == (1, 2, 1)
    assert torch.equal(result, torch.full((16,), 3.0))
    view = result[4:]
    del result
    assert torch.equal(view, torch.full((12,), 3.0))
    again = array.torch()
    del array, view
    assert torch.equal(again, torch.full((16,), 3.0))
    assert alive() == (1, 1, 1)


@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("kind", ["value", "status", "nested"])
def test_failure_at_every_element(bad: int, kind: str) -> None:
    tensors = [torch.ones(16) for _ in range(6)]
    before = counts_of(tensors)
    values: list[Any] = list(tensors)
    if kind == "value":
        values[bad] = object()
    elif kind == "nested":
        values[bad] = [tensors[bad], [object()]]
    held = counts_of(tensors)
    if kind == "status":
        _importing.refuse_import_after(bad)
    try:
        with pytest.raises((TypeError, RuntimeError), match=f"^element {bad}") as caught:
            im.to_variant_list(values)
    finally:
        _importing.refuse_import_after(-1)
    assert alive() == (0, 0, 0)
    del caught
    gc.collect()
    assert counts_of(tensors) == held
    del values
    assert counts_of(tensors) == before


def test_refused_import_speaks_as_iree_does() -> None:
    tensor = torch.ones(16)
    _importing.refuse_import_after(1)
    with pytest.raises(RuntimeError) as caught:
        im.to_variant_list([1, tensor, tensor])
    assert type(caught.value) is RuntimeError
    text = (
        f"element 2: cannot import 64 bytes at {tensor.data_ptr():#x}: UNAVAILABLE; external buffer type not supported"
    )
    assert str(caught.value) == text


def test_ten_thousand_calls_leave_nothing() -> None:
    tensors = [torch.ones(16) for _ in range(4)]
    before = counts_of(tensors)
    for _ in range(10_000):
        im.to_variant_list(tensors)
    assert alive() == (0, 0, 0)
    assert counts_of(tensors) == before


def test_ten_thousand_failing_calls_leave_nothing() -> None:
    tensor = torch.ones(16)
    before = sys.getrefcount(tensor)
    for _ in range(10_000):
        with pytest.raises(TypeError):
            im.to_variant_list([tensor, object()])
    assert sys.getrefcount(tensor) == before


@pytest.mark.parametrize("count", [1, 64, 400, 10_000])
def test_any_number_of_tensors(count: int) -> None:
    tensors = [torch.full((4,), float(index)) for index in range(count)]
    aligned = [tensor for tensor in tensors if tensor.data_ptr() % 64 == 0]
    assert len(aligned) == count
    variants = im.to_variant_list(tensors)
    results = im.from_variant_list(variants)
    assert [result.data_ptr() for result in results] == [tensor.data_ptr() for tensor in tensors]
    assert alive() == (count, count, 1)


def test_views_of_high_rank_leave_the_slab() -> None:
    tensors = [torch.ones([1] * rank + [16]) for rank in range(20)]
    variants = im.to_variant_list(tensors)
    assert [tuple(result.shape) for result in im.from_variant_list(variants)] == [tuple(t.shape) for t in tensors]


def test_one_view_outlives_its_list() -> None:
    variants = im.to_variant_list([torch.full((16,), float(index)) for index in range(10)])
    view = variants.get_as_object(3, rt.HalBufferView)
    del variants
    assert alive() == (1, 0, 1)
    keeper = rt.VmVariantList(1)
    keeper.push_ref(view)
    del view
    assert im.from_variant_list(keeper)[0][0].item() == 3.0


# ---- other threads, pending exceptions ------------------------------------------------------------


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what


@pytest.mark.parametrize("rounds", [20])
def test_released_by_a_worker_of_iree(rounds: int) -> None:
    """The list is dropped while the work runs: IREE's own thread lets go of the input, without the GIL."""
    device = private_device("local-task")
    program = modules.Program(modules.SLOW, device, "main", "--iree-execution-model=async-external")
    for _ in range(rounds):
        tensor = torch.eye(512)
        alive = weakref.ref(tensor)
        done = device.create_semaphore(0)
        values = [tensor, rt.HalFence.create_at(device.create_semaphore(0), 0), rt.HalFence.create_at(done, 1)]
        arguments = im.to_variant_list(values, device=device)
        results = program.invoke(arguments)
        del arguments, values, tensor
        done.wait(1)
        (result,) = im.from_variant_list(results, device=device)
        assert torch.equal(result, torch.eye(512))
        del results, result

        def gone(alive: Any = alive) -> bool:
            _lifetime.live_counts()  # drains the queue
            return alive() is None

        wait_for(gone, "IREE's worker never let go of the input")


def test_dropped_on_a_foreign_thread() -> None:
    holder = [im.to_variant_list([torch.ones(16)])]
    results = im.from_variant_list(holder[0])
    thread = threading.Thread(target=lambda: (holder.clear(), results.clear()))
    thread.start()
    thread.join()
    assert alive() == (0, 0, 0)


class Noisy(torch.Tensor):
    """Runs Python code when it dies."""

    died = 0

    def __del__(self) -> None:
        Noisy.died += 1
        try:
            raise KeyError("from a destructor")
        except KeyError:
            pass


def test_exception_pending_when_a_tensor_dies() -> None:
    before = Noisy.died
    with pytest.raises(TypeError, match=r"^element 1: expected"):
        im.to_variant_list([torch.ones(16).as_subclass(Noisy), object()])
    gc.collect()
    assert alive() == (0, 0, 0)
    assert Noisy.died == before + 1


def test_list_that_shrinks_while_it_is_converted() -> None:
    values: list[Any] = [torch.ones(16)]

    class Shrinking:
        def __dlpack__(self, **options: Any) -> Any:
            values.clear()
            return torch.ones(16).__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    values += [Shrinking(), torch.ones(16)]
    with pytest.raises(RuntimeError, match="the list changed its length while it was converted"):
        im.to_variant_list(values)


def test_eight_threads() -> None:
    shared = [torch.full((16,), float(index)) for index in range(8)]
    before = counts_of(shared)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(200):
                own = torch.full((16,), float(seed * 1000 + step))
                results = im.from_variant_list(im.to_variant_list([*shared, own, seed]))
                assert results[-1] == seed
                assert results[-2][0].item() == seed * 1000 + step
                assert [int(result[0]) for result in results[:8]] == list(range(8))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counts_of(shared) == before
