# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments seen before, and fixed ones: what costs nothing, and what must never be taken for known."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import executor_modules as modules
import pytest
import torch
from executor_support import BOTH_PATHS, aligned, executor, live, with_f32

from iree_marshal import _importing
from iree_marshal.executor import Executor


@contextlib.contextmanager
def no_import() -> Iterator[None]:
    """Inside, HAL refuses every import."""
    _importing.refuse_import_after(0)
    try:
        yield
    finally:
        _importing.refuse_import_after(-1)


def imports_anew(exe: Executor, *args: Any) -> bool:
    """Whether a call imports something; it fails then."""
    try:
        with no_import():
            exe(*args)
    except RuntimeError as error:
        if "external buffer type not supported" not in str(error):
            raise
        return True
    return False


def test_same_tensors_are_not_imported_again() -> None:
    exe = executor(modules.ADD)
    x, y = aligned(4), torch.ones(4)
    assert imports_anew(exe, x, y)
    assert torch.equal(exe(x, y), x + 1)
    assert not imports_anew(exe, x, y)
    # What was written into the memory is seen: the view is on it, not of it.
    x.add_(5)
    with no_import():
        assert torch.equal(exe(x, y), x + 1)


def test_known_is_by_position() -> None:
    exe = executor(modules.ADD)
    x, y = aligned(4), torch.ones(4)
    exe(x, y)
    assert imports_anew(exe, y, x)
    # The failed call forgot everything.
    assert imports_anew(exe, x, y)


def test_another_tensor_on_the_same_memory_is_known() -> None:
    exe = executor(modules.ADD)
    x, y = aligned(4), torch.ones(4)
    exe(x, y)
    assert not imports_anew(exe, x.view(4), y.detach())
    assert not imports_anew(exe, x.reshape(1, 4)[0], y)
    assert imports_anew(exe, x.clone(), y)


@pytest.mark.parametrize("grad", [False, True])
def test_parameters_are_known(grad: bool) -> None:
    exe = executor(modules.ADD)
    x = torch.nn.Parameter(aligned(4), requires_grad=grad)
    with torch.no_grad():
        exe(x, x)
        assert not imports_anew(exe, x, x)
    if grad:
        # Known or not, with grad mode on the graph would be cut.
        with pytest.raises(ValueError, match="requires grad while grad mode is on"):
            exe(x, x)
    else:
        exe(x, x)
        assert not imports_anew(exe, x, x)


def test_only_the_changed_argument_is_imported() -> None:
    exe = executor(modules.ADD)
    x, y = aligned(4), torch.ones(4)
    exe(x, y)
    _importing.refuse_import_after(1)
    try:
        assert torch.equal(exe(x, torch.full((4,), 3.0)), x + 3)
        with pytest.raises(RuntimeError):
            exe(x, torch.full((4,), 4.0))
    finally:
        _importing.refuse_import_after(-1)


# ---- never stale -------------------------------------------------------------------------------------


def test_resized() -> None:
    exe = executor(modules.DYNAMIC)
    x = aligned(2, 4)
    exe(x)
    x.resize_(1, 4)
    assert torch.equal(exe(x), aligned(1, 4) * 2)
    x.resize_(64, 4).fill_(3.0)
    assert torch.equal(exe(x), torch.full((64, 4), 6.0))


def test_set_to_other_memory() -> None:
    exe = executor(modules.ADD)
    x, zero = aligned(4), torch.zeros(4)
    exe(x, zero)
    other = torch.full((4,), 9.0)
    x.set_(other)  # type: ignore[call-overload]
    assert torch.equal(exe(x, zero), other)
    x.data = torch.full((4,), 7.0)
    assert torch.equal(exe(x, zero), torch.full((4,), 7.0))


def test_other_dtype_in_the_same_memory() -> None:
    exe = executor(modules.ADD)
    x, zero = aligned(4), torch.zeros(4)
    exe(x, zero)
    x.data = x.view(torch.int32)
    with pytest.raises(ValueError, match=r"got a tensor of shape \(4,\) and dtype torch.int32$"):
        exe(x, zero)


def test_other_strides_and_bits_in_the_same_memory() -> None:
    exe = executor(modules.DYNAMIC)
    x = aligned(4, 4)
    exe(x)
    x.t_()
    assert torch.equal(exe(x), x * 2)
    x.t_()
    exe(x)
    assert torch.equal(exe(torch._neg_view(x)), x * -2)
    assert torch.equal(exe(x), x * 2)


def test_storage_shrunk_under_a_known_tensor() -> None:
    exe = executor(modules.ADD)
    x, zero = aligned(4), torch.zeros(4)
    exe(x, zero)
    x.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match="ends at byte 16 of a storage of 8"):
        exe(x, zero)
    x.untyped_storage().resize_(16)
    x.copy_(aligned(4))
    assert torch.equal(exe(x, zero), aligned(4))


def test_storage_shrunk_that_lies_where_it_lay_before() -> None:
    # Resizing moves a storage; done twice it may end up at its old address, with fewer bytes.
    exe = executor(modules.DYNAMIC)
    again = 0
    for number in range(200):
        x = torch.ones(64 + number % 8, 4)
        nbytes, address = x.numel() * 4, x.data_ptr()
        exe(x)
        x.untyped_storage().resize_(4 * nbytes)
        x.untyped_storage().resize_(nbytes - 4)
        again += x.data_ptr() == address
        with pytest.raises(ValueError, match=f"ends at byte {nbytes} of a storage of {nbytes - 4}$"):
            exe(x)
    assert again > 0, "no storage came back to its address, so nothing was tested"


def test_memory_freed_and_allocated_again() -> None:
    # As an allocator does that hands a freed block out again: the address alone must not be trusted.
    exe = executor(modules.DYNAMIC)
    block = aligned(64, 4).numpy()
    for number in range(5):
        exe.trim()
        x = torch.from_numpy(block.reshape(64, 4))
        x.fill_(float(number))
        assert torch.equal(exe(x), torch.full((64, 4), 2.0 * number))
        x.set_(torch.zeros(0))  # type: ignore[call-overload]
        fresh = torch.from_numpy(block.reshape(64, 4))
        assert fresh.data_ptr() == block.ctypes.data
        fresh.fill_(-1.0 - number)
        assert imports_anew(exe, fresh)
        assert torch.equal(exe(fresh), fresh * 2)


def test_known_tensor_that_let_go_does_not_vouch_for_another() -> None:
    exe = executor(modules.DYNAMIC)
    x = torch.full((64, 4), 1.0)
    alias = x.view(64, 4)
    exe(x)
    x.set_(torch.zeros(0))  # type: ignore[call-overload]
    # The memory is still there, but the one who kept it for IREE is not.
    assert imports_anew(exe, alias)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4)])
def test_small_and_empty(shape: tuple[int, ...]) -> None:
    exe = executor(modules.DYNAMIC)
    x = torch.ones(shape)
    for _ in range(2):
        assert torch.equal(exe(x), x * 2)
    assert not imports_anew(exe, x)


# ---- what is kept alive --------------------------------------------------------------------------------


@BOTH_PATHS
def test_arguments_are_kept_until_the_next_call_at_most(path: str) -> None:
    exe = executor(modules.ADD, path=path)
    weight, one = aligned(4), torch.ones(4)
    x = aligned(4, start=1)
    exe(weight, x)
    gone = weakref.ref(x)
    del x
    exe(weight, one)
    gc.collect()
    assert gone() is None
    gone = weakref.ref(one)
    del one
    exe.trim()
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(weight) == 2


def test_calls_side_by_side_leave_only_the_last_ones_arguments() -> None:
    exe = executor(modules.ADD)
    pairs = [(aligned(4), aligned(4, start=1)), (aligned(4, start=2), aligned(4, start=3))]
    frames = [exe._engine.prepare(pair, None) for pair in pairs]
    gone = [weakref.ref(tensor) for tensor in pairs[0]]
    for frame, (x, y) in zip(frames, pairs, strict=True):
        exe._engine.run(frame)
        assert torch.equal(exe._engine.collect(frame), x + y)
    kept = pairs.pop()
    del frames, frame, x, y, pairs
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert not imports_anew(exe, *kept)


def test_numbers_of_live_imports() -> None:
    before = live()
    exe = executor(modules.ADD)
    x = aligned(4)
    for _ in range(3):
        exe(x, aligned(4))
        assert live()[0] - before[0] == 2
    exe.trim()
    assert live() == before
    exe(x, x)
    del exe
    assert live() == before


def test_copies_are_not_taken_for_the_original() -> None:
    exe = executor(modules.ADD)
    x, one = torch.zeros(8)[::2], torch.ones(4)
    assert torch.equal(exe(x, one), torch.ones(4))
    x.fill_(5.0)
    assert torch.equal(exe(x, one), torch.full((4,), 6.0))
    copying = executor(modules.ADD, copy=True)
    y = aligned(4)
    copying(y, one)
    y.fill_(2.0)
    assert torch.equal(copying(y, one), torch.full((4,), 3.0))


def test_a_finalizer_that_calls_the_executor() -> None:
    exe = executor(modules.ADD)
    zero = torch.zeros(4)
    seen: list[torch.Tensor] = []

    class Noisy(torch.Tensor):
        def __del__(self) -> None:
            seen.append(exe(torch.full((4,), 8.0), zero))

    exe(aligned(4).as_subclass(Noisy), zero)
    # The old argument goes while the new one is written: another frame serves the call inside.
    assert torch.equal(exe(aligned(4, start=3), zero), aligned(4, start=3))
    assert seen
    assert all(torch.equal(value, torch.full((4,), 8.0)) for value in seen)


# ---- bind ------------------------------------------------------------------------------------------------


@BOTH_PATHS
def test_bind_and_unbind(path: str) -> None:
    exe = with_f32(modules.NAMED, path)
    x, weight = aligned(4), torch.zeros(2, 3, dtype=torch.int32)
    exe.bind({1: weight, 2: 3})
    assert torch.equal(exe(x), x)
    exe.bind({0: x})
    assert torch.equal(exe(), x)
    exe.unbind([0, 2])
    assert torch.equal(exe(x, 1.0), x)
    exe.unbind()
    assert torch.equal(exe(x, weight, 1.0), x)


@BOTH_PATHS
def test_bound_memory_is_shared(path: str) -> None:
    exe = executor(modules.ADD, path=path)
    weight, x = torch.ones(4), aligned(4)
    exe.bind({1: weight})
    assert torch.equal(exe(x), x + 1)
    weight.fill_(4.0)
    assert torch.equal(exe(x), x + 4)
    # The object may go its own way; what was bound was its memory.
    held = weight.view(4)
    weight.data = torch.full((4,), 100.0)
    assert torch.equal(exe(x), x + 4)
    held.fill_(5.0)
    assert torch.equal(exe(x), x + 5)
    del weight, held
    gc.collect()
    assert torch.equal(exe(x), x + 5)
    exe.bind({1: torch.full((4,), 6.0)})
    assert torch.equal(exe(x), x + 6)


def test_bound_arguments_are_imported_once() -> None:
    before = live()
    exe = executor(modules.ADD)
    exe.bind({0: aligned(4), 1: torch.ones(4)})
    with no_import():
        for _ in range(3):
            assert torch.equal(exe(), aligned(4) + 1)
    exe.trim()
    with no_import():
        assert torch.equal(exe(), aligned(4) + 1)
    del exe
    assert live() == before


@BOTH_PATHS
def test_refused_bindings_change_nothing(path: str) -> None:
    exe = executor(modules.STORAGE_BUFFER, path=path)
    x = aligned(4)
    for fixed, error, message in (
        ({"x": x}, TypeError, "bind: expected the index of an argument, got 'x'"),
        ({True: x}, TypeError, "bind: expected the index of an argument, got True"),
        ({-1: x}, ValueError, "bind: the function takes no argument -1 from its caller"),
        ({1: x}, ValueError, "bind: the function takes no argument 1 from its caller"),
        ({3: x}, ValueError, "bind: the function takes no argument 3 from its caller"),
        ({0: x, 7: x}, ValueError, "bind: the function takes no argument 7 from its caller"),
        (
            {0: x.double()},
            ValueError,
            "argument 0 (x): expected tensor<4xf32>, got a tensor of shape (4,) and dtype torch.float64",
        ),
    ):
        with pytest.raises(error) as caught:
            exe.bind(fixed)  # type: ignore[arg-type]
        assert str(caught.value) == message
    with pytest.raises(ValueError, match=r"^unbind: argument 0 is not bound$"):
        exe.unbind([0])
    with pytest.raises(ValueError, match="requires grad while grad mode is on"):
        exe.bind({0: torch.nn.Parameter(x)})
    assert torch.equal(exe(x)[0], x * 2)


def test_bind_while_calls_are_in_flight() -> None:
    exe = executor(modules.ADD)
    zero = torch.zeros(4)
    exe.bind({1: zero})
    frame = exe._engine.prepare((aligned(4),), None)
    exe.bind({1: torch.ones(4)})
    exe._engine.run(frame)
    assert torch.equal(exe._engine.collect(frame), aligned(4))
    assert torch.equal(exe(aligned(4)), aligned(4) + 1)
