# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory for results: the slab of a call, the caller's own tensors, and outputs kept for all calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import executor_modules as modules
import numpy as np
import pytest
import releases
import torch
from executor_support import BOTH_PATHS, aligned, executor, live, resident_bytes
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from iree_marshal import slab
from iree_marshal.executor import Executor
from iree_marshal.signature import parse

pytestmark = BOTH_PATHS
KINDS = pytest.mark.parametrize("program", ["STORAGE_BUFFER", "STORAGE_VIEW"])


def load(program: str, path: str, **options: Any) -> Executor:
    return executor(getattr(modules, program), path=path, **options)


def refusal(exe: Executor, *args: Any, out: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        exe(*args, out=out)
    assert type(caught.value) is error
    return str(caught.value)


# ---- the slab -------------------------------------------------------------------------------------


@KINDS
def test_results_are_parts_of_one_allocation(path: str, program: str) -> None:
    exe = load(program, path)
    x = aligned(4)
    y, z = exe(x)
    assert torch.equal(y, x * 2)
    assert torch.equal(z, (x * 2).int())
    assert z.dtype == torch.int32
    assert y.data_ptr() % slab.SLICE_ALIGNMENT == 0
    assert z.data_ptr() - y.data_ptr() == slab.SLICE_ALIGNMENT
    assert y.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
    assert y.is_contiguous()
    assert not y.requires_grad
    assert type(y) is torch.Tensor


@KINDS
def test_every_call_gets_new_memory(path: str, program: str) -> None:
    exe = load(program, path)
    before = live()
    held = [exe(aligned(4, start=number)) for number in range(20)]
    for number, (y, z) in enumerate(held):
        assert torch.equal(y, aligned(4, start=number) * 2)
        assert torch.equal(z, (aligned(4, start=number) * 2).int())
    assert len({y.data_ptr() for y, _ in held}) == 20
    if path == "native":
        # Only the argument waits for the next call; the slab is the caller's alone.
        assert live()[0] == before[0] + 1
    exe.trim()
    assert live() == before
    part = held[7][1]
    del held, exe, y, z
    gc.collect()
    assert torch.equal(part, (aligned(4, start=7) * 2).int())


def test_results_may_be_written_and_trained_on(path: str) -> None:
    y, z = load("STORAGE_BUFFER", path)(aligned(4))
    y.requires_grad_()
    (y * 3).sum().backward()
    assert torch.equal(y.grad, torch.full((4,), 3.0))
    z.add_(1)
    assert torch.equal(y.detach(), aligned(4) * 2)


def test_slab_goes_with_its_last_part(path: str) -> None:
    exe = executor(modules.LARGE_STORAGE, path=path)
    x = torch.ones(1 << 20)
    exe(x)
    exe.trim()
    resident = resident_bytes()
    held = [exe(x)[number % 2] for number in range(40)]
    assert resident_bytes() - resident > 40 * 8 * 2**20 * 0.9
    del held
    exe.trim()
    assert resident_bytes() - resident < 16 * 2**20


@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference"])
def test_under_every_grad_mode(path: str, grad: str) -> None:
    exe = load("STORAGE_BUFFER", path)
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[grad]
    x = aligned(4)
    with mode():
        y, z = exe(x)
    assert torch.equal(y, x * 2)
    assert torch.equal(z, (x * 2).int())
    assert not y.requires_grad


def test_layout(path: str) -> None:
    del path  # the same on both
    signature = parse(
        "func @f(%a: !hal.buffer {iree.abi.output = 1 : index}, %b: !hal.buffer {iree.abi.output = 0 : index}, "
        "%c: !hal.buffer {iree.abi.output = 2 : index}, %d: !hal.buffer {iree.abi.output = 4 : index}) -> "
        "(%p: tensor<65xf32>, %q: tensor<i1>, %r: tensor<0x3xf64>, %s: i32, %t: tensor<2x2xcomplex<f64>>)"
    )
    layout = slab.Layout(signature, torch.device("cpu"))
    assert [(part.result, part.offset, part.nbytes) for part in layout.slices.values()] == [
        (0, 0, 260),
        (1, 512, 1),
        (2, 768, 0),
        (4, 768, 64),
    ]
    assert layout.nbytes == 1024
    tensors = layout.allocate()
    assert sorted(tensors) == [0, 1, 2, 4]
    assert tensors[4].dtype == torch.complex128
    assert tensors[4].stride() == (2, 1)
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors.values())


# ---- out= -------------------------------------------------------------------------------------------


@KINDS
def test_out_is_written_into(path: str, program: str) -> None:
    exe = load(program, path)
    out = [torch.full((4,), -1.0), torch.full((4,), -1, dtype=torch.int32)]
    pointers = [tensor.data_ptr() for tensor in out]
    for number in range(3):
        x = aligned(4, start=number)
        y, z = exe(x, out=out)
        assert y is out[0]
        assert z is out[1]
        assert torch.equal(y, x * 2)
        assert torch.equal(z, (x * 2).int())
    assert [tensor.data_ptr() for tensor in out] == pointers
    # The known output taken away and given other memory.
    out[0].set_(torch.full((4,), 5.0))  # type: ignore[call-overload]
    exe(x, out=out)
    assert torch.equal(out[0], x * 2)
    # A tuple will do, and views into a larger allocation.
    base = torch.zeros(64)
    exe(x, out=(base[16:20], out[1]))
    assert torch.equal(base[16:20], x * 2)
    assert base[:16].count_nonzero() == base[20:].count_nonzero() == 0


def test_bytes_of_the_torch_dialects_storage(path: str) -> None:
    exe = executor(modules.TORCH_STORAGE, path=path, signature=modules.TORCH_STORAGE_SIGNATURE)
    out = torch.full((4,), -1.0)
    assert exe(aligned(4), out=[out]) is out
    assert torch.equal(out, aligned(4) * 2)
    first = exe(aligned(4))
    second = exe(aligned(4, start=1))
    assert torch.equal(first, aligned(4) * 2)
    assert torch.equal(second, aligned(4, start=1) * 2)


def test_out_for_some_results_only(path: str) -> None:
    exe = load("STORAGE_BUFFER", path)
    mine = torch.zeros(4, dtype=torch.int32)
    y, z = exe(aligned(4), out=[None, mine])
    assert z is mine
    assert torch.equal(y, aligned(4) * 2)
    assert torch.equal(mine, (aligned(4) * 2).int())
    y, z = exe(aligned(4), out=[None, None])
    assert z is not mine
    assert torch.equal(y, aligned(4) * 2)
    second = load("STORAGE_SECOND", path)
    mine = torch.zeros(4)
    y, z = second(aligned(4), out=[None, mine])
    assert z is mine
    assert torch.equal(y, aligned(4) * 2)
    assert torch.equal(z, aligned(4) * 2 * aligned(4))
    y, z = second(aligned(4, start=1))
    assert torch.equal(y, aligned(4, start=1) * 2)
    assert torch.equal(z, aligned(4, start=1) ** 2 * 2)
    assert refusal(second, aligned(4), out=[mine, torch.zeros(4)]) == (
        "out[0] (output0): expected None, the function declares no storage for this result"
    )


@releases.NO_STORAGE_OF_UNKNOWN_SIZE
def test_out_of_dynamic_shape(path: str) -> None:
    exe = load("STORAGE_DYNAMIC", path)
    out = torch.zeros(5)
    assert exe(aligned(5), out=[out]) is out
    assert torch.equal(out, aligned(5) * 2)
    with pytest.raises(
        ValueError,
        match=r"^result 0 \(output0\) is a tensor<\?xf32>, whose size is not known before the call; pass out=\[...\]",
    ):
        exe(aligned(5))
    assert refusal(exe, aligned(3), out=[torch.zeros(5)]) == (
        "out[0] (output0): expected shape (3,), the result's, got (5,)"
    )
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT|OUT_OF_RANGE|storage"):
        exe(aligned(64), out=[torch.zeros(5)])
    assert torch.equal(exe(aligned(5, start=2), out=[out]), aligned(5, start=2) * 2)


def test_result_that_is_an_argument_gets_into_its_storage_too(path: str) -> None:
    exe = load("STORAGE_PASSTHROUGH", path)
    x, out = aligned(4), torch.zeros(4)
    assert exe(x, out=[out]) is out
    assert torch.equal(out, x)
    y = exe(x)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()


@releases.CRASHES_ON_UNREAD_ARGUMENTS
def test_storage_that_the_program_ignores_is_filled_all_the_same(path: str) -> None:
    exe = executor(modules.IGNORES_STORAGE, path=path, signature=modules.IGNORES_STORAGE_SIGNATURE)
    out = torch.full((4,), -1.0)
    assert exe(aligned(4), out=[out]) is out
    assert torch.equal(out, aligned(4) * 2)
    assert torch.equal(exe(aligned(4, start=1)), aligned(4, start=1) * 2)


def test_out_without_storage_arguments(path: str) -> None:
    exe = load("ADD", path)
    message = (
        "out=: the function declares no storage arguments (iree.abi.output), so IREE allocates its results itself; "
        "compile it with storage arguments or copy the results"
    )
    x = aligned(4)
    assert refusal(exe, x, x, out=[torch.zeros(4)]) == message
    assert torch.equal(exe(x, x), x * 2)
    assert refusal(executor(modules.TORCH_ADD, path=path), x, x, out=[torch.zeros(4)]) == message


def test_refused_outputs(path: str) -> None:
    exe = load("STORAGE_PAIR", path)
    x = aligned(16)
    good = torch.zeros(16)
    base = torch.zeros(64)
    storage_too_small = torch.zeros(16)
    storage_too_small.untyped_storage().resize_(16)
    first, second = "out[0] (output0):", "out[1] (output1):"
    wanted = "expected tensor<16xf32>, got a tensor of"
    for out, error, message in (
        ([x, good], ValueError, f"{first} its memory overlaps argument 0 (input0)"),
        ([good, x], ValueError, f"{second} its memory overlaps argument 0 (input0)"),
        ([good, good], ValueError, f"{second} its memory overlaps out[0] (output0)"),
        ([base[:16], base[:16]], ValueError, f"{second} its memory overlaps out[0] (output0)"),
        ([good, good.double()], ValueError, f"{second} {wanted} shape (16,) and dtype torch.float64"),
        ([torch.zeros(4, 4), good], ValueError, f"{first} {wanted} shape (4, 4) and dtype torch.float32"),
        ([torch.zeros(15), good], ValueError, f"{first} {wanted} shape (15,) and dtype torch.float32"),
        (
            [torch.zeros(32)[::2], good],
            ValueError,
            f"{first} expected contiguous memory, got shape (16,) with strides (2,)",
        ),
        ([base[1:17], good], ValueError, f"{first} expected memory aligned to 64 bytes, got address % 64 = 4"),
        (
            [torch._neg_view(good), base[:16]],
            ValueError,
            f"{first} expected plain memory, got a conjugate or negative view",
        ),
        ([torch.zeros(16, device="meta"), good], ValueError, f"{first} expected a tensor on cpu, got one on meta"),
        ([storage_too_small, good], ValueError, f"{first} expected 64 bytes of memory, got a storage with 16 there"),
        ([np.zeros(16, np.float32), good], TypeError, f"{first} expected a torch.Tensor or None, got ndarray"),
        ([good], ValueError, "out: expected 2 tensors, one per result, got 1"),
        ([good, base[:16], base[16:32]], ValueError, "out: expected 2 tensors, one per result, got 3"),
        (good, TypeError, "out: expected a list with one tensor per result, got Tensor"),
        ({0: good}, TypeError, "out: expected a list with one tensor per result, got dict"),
        (
            [torch.nn.Parameter(torch.zeros(16)), good],
            ValueError,
            f"{first} the tensor requires grad while grad mode is on, and writing into it would not be recorded; "
            "call under torch.no_grad()",
        ),
    ):
        assert refusal(exe, x, out=out, error=error) == message
    y, z = exe(x, out=[good, base[16:32]])
    assert torch.equal(y, x * 2)
    assert torch.equal(z, x * x * 2)


def test_overlap_with_bound_and_with_newly_passed_arguments(path: str) -> None:
    exe = load("STORAGE_PAIR", path)
    x, out = aligned(16), [torch.zeros(16), torch.zeros(16)]
    exe(x, out=out)
    # The outputs are known by now; the argument is what changed.
    assert refusal(exe, out[1], out=out) == "out[1] (output1): its memory overlaps argument 0 (input0)"
    exe.bind({0: x})
    exe(out=out)
    assert refusal(exe, out=[x, out[1]]) == "out[0] (output0): its memory overlaps argument 0 (input0)"
    assert torch.equal(exe(out=out)[0], x * 2)


def test_neighbours_do_not_overlap(path: str) -> None:
    exe = load("STORAGE_PAIR", path)
    base = torch.zeros(64)
    x = base[32:48]
    x.copy_(aligned(16))
    y, z = exe(x, out=[base[48:64], base[16:32]])
    assert torch.equal(y, aligned(16) * 2)
    assert torch.equal(z, aligned(16) ** 2 * 2)


# ---- reuse_outputs --------------------------------------------------------------------------------------


@KINDS
def test_reused_outputs(path: str, program: str) -> None:
    exe = load(program, path, reuse_outputs=True)
    first = exe(aligned(4))
    kept = [tensor.clone() for tensor in first]
    second = exe(aligned(4, start=5))
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert torch.equal(first[0], aligned(4, start=5) * 2)
    assert torch.equal(kept[0], aligned(4) * 2)
    exe.trim()
    assert exe(aligned(4))[0] is first[0]
    mine = [torch.zeros(4), torch.zeros(4, dtype=torch.int32)]
    assert exe(aligned(4, start=1), out=mine)[0] is mine[0]
    assert torch.equal(first[0], aligned(4) * 2)
    assert exe(aligned(4, start=2))[0] is first[0]
    assert torch.equal(first[0], aligned(4, start=2) * 2)
    assert torch.equal(mine[0], aligned(4, start=1) * 2)
    with pytest.raises(ValueError, match=r"^out\[0\] \(y\): its memory overlaps argument 0 \(x\)$"):
        exe(first[0])
    exe(aligned(4, start=3))
    assert torch.equal(first[0], aligned(4, start=3) * 2)


def test_reused_outputs_of_the_torch_dialect(path: str) -> None:
    exe = executor(modules.TORCH_STORAGE, path=path, signature=modules.TORCH_STORAGE_SIGNATURE, reuse_outputs=True)
    first = exe(aligned(4))
    assert exe(aligned(4, start=1)) is first
    assert torch.equal(first, aligned(4, start=1) * 2)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("ADD", "reuse_outputs=True: the function declares no storage arguments (iree.abi.output)"),
        ("TORCH_ADD", "reuse_outputs=True: the function declares no storage arguments (iree.abi.output)"),
        ("STORAGE_SECOND", "reuse_outputs=True: result 0 (output0) has no storage argument"),
        pytest.param(
            "STORAGE_DYNAMIC",
            "reuse_outputs=True: result 0 (output0) is a tensor<?xf32>, whose size is not known before the call",
            marks=releases.NO_STORAGE_OF_UNKNOWN_SIZE,
        ),
    ],
)
def test_outputs_that_cannot_be_reused(path: str, program: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        load(program, path, reuse_outputs=True)
    assert str(caught.value) == message


# ---- memory that torch would not make as asked -----------------------------------------------------


class Refusing(TorchDispatchMode):
    """Answers no operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run")


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fake": FakeTensorMode,
    "fake, real tensors allowed": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "refusing": Refusing,
    "inference": torch.inference_mode,
    "meta by default": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reuse", [False, True])
def test_slab_has_memory_in_every_mode(path: str, mode: str, reuse: bool) -> None:
    """The first call is the one that allocates what later calls use again."""
    exe = load("STORAGE_BUFFER", path, reuse_outputs=reuse)
    x = aligned(4)
    out = [aligned(4, start=1.0), None]
    with MODES[mode]():
        first = exe(x)
        mixed = exe(x, out=out)
    for results in (first, mixed, exe(x)):
        assert [type(result) for result in results] == [torch.Tensor, torch.Tensor]
        assert torch.equal(results[0], x * 2)
        assert torch.equal(results[1], (x * 2).int())


def test_slab_within_transforms(path: str) -> None:
    exe = load("STORAGE_BUFFER", path)
    x = aligned(4)

    def weighted(weight: torch.Tensor) -> torch.Tensor:
        y, z = exe(x)
        return (weight * y * z).sum()

    assert torch.func.grad(weighted)(torch.ones(4)).tolist() == [0.0, 4.0, 16.0, 36.0]
    assert torch.func.functionalize(weighted)(torch.ones(4)).item() == 56.0


@pytest.mark.parametrize("reuse", [False, True])
def test_results_change_in_place_one_by_one(path: str, reuse: bool) -> None:
    """What autograd keeps of one result is still good when another one was written."""
    exe = load("STORAGE_BUFFER", path, reuse_outputs=reuse)
    with torch.inference_mode():
        exe(aligned(4))
    y, z = exe(aligned(4)) if reuse else exe(aligned(4), out=[None, None])
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * y).sum()
    z.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 2.0, 4.0, 6.0]
