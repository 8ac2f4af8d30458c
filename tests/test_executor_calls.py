# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments, results and refusals of a call, on both paths."""

from __future__ import annotations

import gc
import re
import sys
from typing import Any

import executor_modules as modules
import iree.runtime as rt
import numpy as np
import pytest
import releases
import torch
from executor_support import BOTH_PATHS, aligned, executor, live, with_f32

import iree_marshal
from iree_marshal import calling, devices, loading
from iree_marshal.executor import Executor
from iree_marshal.signature import SignatureError, parse

pytestmark = BOTH_PATHS


def refusal(exe: Executor, *args: Any, error: type[Exception] = ValueError, **options: Any) -> str:
    """What a call that must fail says; and a good call must work right after."""
    with pytest.raises(error) as caught:
        exe(*args, **options)
    assert type(caught.value) is error
    return str(caught.value)


# ---- results --------------------------------------------------------------------------------------


def test_one_result_is_bare(path: str) -> None:
    exe = executor(modules.ADD, path=path)
    result = exe(aligned(4), aligned(4, start=1))
    assert type(result) is torch.Tensor
    assert torch.equal(result, torch.tensor([1.0, 3.0, 5.0, 7.0]))


def test_no_result_is_none(path: str) -> None:
    assert executor(modules.NOTHING, path=path)() is None
    assert executor(modules.NO_RESULT, path=path)(aligned(4)) is None


def test_several_results_are_a_tuple_and_numbers_stay(path: str) -> None:
    exe = executor(modules.MIXED_RESULTS, modules.WIDE, path=path)
    result = exe(aligned(4), 2**40)
    assert type(result) is tuple
    assert torch.equal(result[0], aligned(4) * 2)
    assert result[1] == 2**40
    assert type(result[1]) is int


def test_floats_that_iree_would_take_the_low_bytes_of(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a runtime before 3.10: the native path passes an f32, the portable one has no call for it."""
    monkeypatch.setattr(calling, "_takes_any_float", lambda: False)
    exe = executor(modules.NARROW_FLOAT, path=path)
    if path == "native":
        assert exe(0.1, 2) == (float(np.float32(0.1)), 2)
        exe.bind({0: 2.5})
        assert exe(3) == (2.5, 3)
    else:
        message = "argument 0 (input0): iree-base-runtime before 3.10 takes the low bytes of a float for an f32"
        assert refusal(exe, 0.1, 2, error=NotImplementedError).startswith(message)
        with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
            exe.bind({0: 2.5})


@releases.NO_F64_SCALARS
def test_all_scalar_kinds(path: str) -> None:
    exe = with_f32(modules.SCALARS, path, modules.WIDE)
    assert exe(-7, 2**40, 2, 0.1, True) == (-7, 2**40, 2.0, 0.1, 1)
    assert exe(np.int64(3), np.uint8(4), np.float32(2.5), np.float64(0.1), np.bool_(0)) == (3, 4, 2.5, 0.1, 0)
    tensors = torch.tensor(3), torch.tensor(4), torch.tensor(2.5), torch.tensor(0.5), torch.tensor(True)
    assert exe(*tensors) == (3, 4, 2.5, 0.5, 1)
    # Twice the same numbers, then others: a position that holds a number is written each time.
    assert exe(1, 1, 1.0, 1.0, 1) == (1, 1, 1.0, 1.0, 1)
    assert exe(2, 2, 2.0, 2.0, 0) == (2, 2, 2.0, 2.0, 0)


def test_nested_lists_and_references_keep_their_positions(path: str) -> None:
    exe = executor(modules.LISTS, path=path)
    view = iree_marshal.to_variant_list([aligned(3)]).get_as_object(0, rt.HalBufferView)
    nested, tensor = exe([1, [2.5, aligned(2)], 3], view)
    assert nested[0] == 1
    assert nested[1][0] == 2.5
    assert torch.equal(nested[1][1], aligned(2))
    assert nested[2] == 3
    assert torch.equal(tensor, aligned(3))


def test_odd_sizes_each_result_on_its_own(path: str) -> None:
    exe = executor(modules.ODD_SIZES, path=path)
    first, second = exe(aligned(5))
    assert torch.equal(first, aligned(5) + 1)
    assert torch.equal(second, aligned(5)[:, None].expand(5, 3))
    del first, exe
    gc.collect()
    assert torch.equal(second, aligned(5)[:, None].expand(5, 3))


def test_result_that_is_an_argument_shares_its_memory(path: str) -> None:
    exe = executor(modules.TWICE, path=path)
    x = aligned(4)
    y, z = exe(x)
    assert y.data_ptr() == x.data_ptr() == z.data_ptr()
    del x, exe
    gc.collect()
    assert torch.equal(y + 1, aligned(4) + 1)
    protected = executor(modules.TWICE, path=path, copy=True)
    x = aligned(4)
    y, z = protected(x)
    assert x.data_ptr() not in (y.data_ptr(), z.data_ptr())


def test_results_outlive_the_executor_and_arguments_keep_their_counts(path: str) -> None:
    x = aligned(4)
    before = sys.getrefcount(x)
    exe = executor(modules.ADD, path=path)
    y = exe(x, x)
    del exe
    gc.collect()
    assert torch.equal(y, x * 2)
    assert sys.getrefcount(x) == before


# ---- arguments --------------------------------------------------------------------------------------


def test_what_tensors_may_be(path: str) -> None:
    exe = executor(modules.ADD, path=path)
    one = torch.ones(4)
    for value in (
        np.arange(4, dtype=np.float32),
        torch.arange(8, dtype=torch.float32)[::2] / 2,
        torch.arange(5, dtype=torch.float32)[1:] - 1,
        torch._neg_view(-aligned(4)),
        torch.nn.Parameter(aligned(4), requires_grad=False),
    ):
        assert torch.equal(exe(value, one), aligned(4) + 1)
    with torch.no_grad():
        assert torch.equal(exe(torch.nn.Parameter(aligned(4)), one), aligned(4) + 1)


def test_dynamic_sizes(path: str) -> None:
    exe = executor(modules.DYNAMIC, path=path)
    for rows in (3, 1, 7, 3):
        x = aligned(rows, 4)
        assert torch.equal(exe(x), x * 2)
    assert refusal(exe, torch.zeros(4)) == (
        "argument 0 (input0): expected tensor<?x4xf32>, got a tensor of shape (4,) and dtype torch.float32"
    )
    assert refusal(exe, torch.zeros(2, 5)) == (
        "argument 0 (input0): expected tensor<?x4xf32>, got a tensor of shape (2, 5) and dtype torch.float32"
    )
    assert torch.equal(exe(torch.ones(2, 4)), torch.full((2, 4), 2.0))


def test_unsigned_and_signed_bytes(path: str) -> None:
    exe = executor(modules.UNSIGNED, path=path)
    result = exe(torch.tensor([1, 2, 100, 127], dtype=torch.uint8))
    assert result.dtype == torch.int8
    assert result.view(torch.uint8).tolist() == [2, 4, 200, 254]
    assert exe(torch.tensor([1, -2, 3, -4], dtype=torch.int8)).tolist() == [2, -4, 6, -8]
    assert "dtype torch.bool" in refusal(exe, torch.ones(4, dtype=torch.bool))


def test_count(path: str) -> None:
    exe = with_f32(modules.NAMED, path)
    expected = "expected 3 arguments (x: tensor<4xf32>, weight.0: tensor<2x?xi32>, scale: f32)"
    weight = torch.zeros(2, 3, dtype=torch.int32)
    assert refusal(exe, error=TypeError) == f"{expected}, got 0"
    assert refusal(exe, aligned(4), weight, error=TypeError) == f"{expected}, got 2"
    assert refusal(exe, aligned(4), weight, 1.0, 1.0, error=TypeError) == f"{expected}, got 4"
    exe.bind({1: weight})
    assert refusal(exe, aligned(4), error=TypeError) == (
        "expected 2 arguments (x: tensor<4xf32>, scale: f32) besides 1 bound, got 1"
    )
    exe.bind({2: 1.0})
    assert refusal(exe, error=TypeError) == "expected 1 argument (x: tensor<4xf32>) besides 2 bound, got 0"
    assert torch.equal(exe(aligned(4)), aligned(4))
    nothing = executor(modules.NOTHING, path=path)
    assert refusal(nothing, 1, error=TypeError) == "expected 0 arguments, got 1"


def test_refusals_carry_index_name_expected_and_got(path: str) -> None:
    exe = with_f32(modules.NAMED, path)
    x, weight = aligned(4), torch.zeros(2, 3, dtype=torch.int32)
    assert refusal(exe, x.double(), weight, 1.0) == (
        "argument 0 (x): expected tensor<4xf32>, got a tensor of shape (4,) and dtype torch.float64"
    )
    assert refusal(exe, x, weight.float(), 1.0) == (
        "argument 1 (weight.0): expected tensor<2x?xi32>, got a tensor of shape (2, 3) and dtype torch.float32"
    )
    assert refusal(exe, x, np.zeros((3, 2), np.int32), 1.0) == (
        "argument 1 (weight.0): expected tensor<2x?xi32>, got a tensor of shape (3, 2) and dtype torch.int32"
    )
    assert refusal(exe, x, weight, 2**24 + 1) == (
        "argument 2 (scale): expected f32, got int 16777217, which f32 cannot hold exactly"
    )
    assert refusal(exe, x, weight, 1e39) == (
        "argument 2 (scale): expected f32, got float 1e+39, which is beyond the largest f32"
    )
    assert refusal(exe, x, weight, torch.ones(2)) == (
        "argument 2 (scale): expected f32, got Tensor of shape (2,), which is not one number"
    )
    assert refusal(exe, x, weight, "1", error=TypeError) == "argument 2 (scale): expected f32, got str"
    assert refusal(exe, 3, weight, 1.0, error=TypeError) == "argument 0 (x): expected tensor<4xf32>, got int 3"
    assert refusal(exe, None, weight, 1.0, error=TypeError) == "argument 0 (x): expected tensor<4xf32>, got None"
    assert refusal(exe, [x], weight, 1.0, error=TypeError).startswith(
        "argument 0 (x): expected tensor<4xf32>, got list [tensor("
    )
    assert "got dict" in refusal(exe, {}, weight, 1.0, error=TypeError)
    assert refusal(exe, torch.zeros(4, device="meta"), weight, 1.0, error=TypeError) == (
        "element 0: expected a dense tensor with memory, got a Tensor that is a meta tensor"
    )
    assert "requires grad while grad mode is on" in refusal(exe, torch.nn.Parameter(x), weight, 1.0)
    # The first argument that is wrong is named.
    assert refusal(exe, x, weight.float(), "1").startswith("argument 1 (weight.0)")
    assert torch.equal(exe(x, weight, 1.0), x)


@releases.NO_F64_SCALARS
@pytest.mark.parametrize(("index", "value"), [(0, 2.7), (0, 2**31 + 5), (1, 2**63), (2, 2**24 + 1), (4, 2)])
def test_numbers_that_do_not_fit(path: str, index: int, value: float) -> None:
    exe = with_f32(modules.SCALARS, path, modules.WIDE)
    args: list[Any] = [1, 1, 1.0, 1.0, 1]
    args[index] = value
    kind = ["i32", "i64", "f32", "f64", "i1"][index]
    message = refusal(exe, *args)
    assert message.startswith(
        f"argument {index} (input{index}): expected {kind}, got {type(value).__name__} {value}, which"
    )
    assert exe(1, 1, 1.0, 1.0, 1) == (1, 1, 1.0, 1.0, 1)


def test_copies_refused(path: str) -> None:
    exe = executor(modules.ADD, path=path, copy=False)
    x = aligned(4)
    assert refusal(exe, torch.zeros(8)[::2], x) == (
        "element 0: copy=False, but a copy is needed: not contiguous; shape (4,), strides (2,)"
    )
    assert torch.equal(exe(x, x), x * 2)


# ---- failures ----------------------------------------------------------------------------------------


def test_failing_call_leaves_nothing_behind(path: str) -> None:
    exe = executor(modules.ASSERTING, path=path)
    x = aligned(4)
    assert torch.equal(exe(x, 1), x * 2)
    exe.trim()
    before = live()
    references = sys.getrefcount(x)
    # Marshal in: the first argument is fine, the second is not.
    refusal(exe, x, 2.5)
    assert live() == before
    assert torch.equal(exe(x, 1), x * 2)
    exe.trim()
    # Invoke.
    with pytest.raises(Exception, match="n must be 1"):
        exe(x, 2)
    assert live() == before
    assert torch.equal(exe(x, 1), x * 2)
    exe.trim()
    assert live() == before
    assert sys.getrefcount(x) == references


def test_failing_hand_out_leaves_nothing_behind(path: str) -> None:
    exe = executor(modules.SUB_BYTE, path=path)
    before = live()
    for _ in range(2):
        message = refusal(exe, torch.zeros(4, dtype=torch.int8), error=TypeError)
        assert message.startswith("element 0: torch has no dtype for the HAL element type 0x")
        assert live() == before


def test_failing_storage_leaves_nothing_behind(path: str) -> None:
    exe = executor(modules.STORAGE_BUFFER, path=path)
    x = aligned(4)
    before = live()
    refusal(exe, x, out=[torch.zeros(4), torch.zeros(4)])
    assert live() == before
    assert torch.equal(exe(x)[0], x * 2)


# ---- signatures ---------------------------------------------------------------------------------------


def test_without_signature_only_iree_checks(path: str) -> None:
    exe = executor(modules.TORCH_ADD, path=path)
    assert exe.signature is None
    x, y = aligned(4), torch.ones(4)
    assert torch.equal(exe(x, y), x + 1)
    assert torch.equal(exe(x, y), x + 1)
    with pytest.raises(TypeError, match="input list and function mismatch; expected 2 arguments but passed 1"):
        exe(x)
    with pytest.raises(ValueError, match="INVALID_ARGUMENT"):
        exe(torch.zeros(3), y)
    with pytest.raises(TypeError, match=r"^element 1: expected a torch.Tensor.*, got dict$"):
        exe(x, {})
    assert torch.equal(exe(x, y), x + 1)
    exe.bind({0: x})
    assert torch.equal(exe(y), x + 1)
    exe.unbind()
    assert torch.equal(exe(y, y), y + 1)
    exe.bind({1: x})
    assert torch.equal(exe(y), x + 1)
    assert repr(exe) == "Executor(main on cpu)"


def test_given_signature(path: str) -> None:
    exe = executor(modules.TORCH_ADD, path=path, signature=modules.TORCH_ADD_SIGNATURE)
    assert exe.signature == parse(modules.TORCH_ADD_SIGNATURE)
    assert refusal(exe, aligned(4), torch.zeros(3)) == (
        "argument 1 (b): expected tensor<4xf32>, got a tensor of shape (3,) and dtype torch.float32"
    )
    assert torch.equal(exe(aligned(4), torch.ones(4)), aligned(4) + 1)
    assert exe.signature is not None
    again = executor(modules.TORCH_ADD, path=path, signature=exe.signature)
    assert again.signature is exe.signature
    with pytest.raises(SignatureError, match=re.escape("position 0: expected 'func', got 'nonsense'")):
        executor(modules.TORCH_ADD, path=path, signature="nonsense")


def test_shown(path: str) -> None:
    exe = executor(modules.NAMED, path=path)
    text = "sync func @main(%x: tensor<4xf32>, %weight.0: tensor<2x?xi32>, %scale: f32) -> (%y: tensor<4xf32>)"
    assert str(exe.signature) == text
    assert repr(exe) == f"Executor({text} on cpu)"
    assert exe.device == torch.device("cpu")


def test_over_objects_of_the_callers_own(path: str) -> None:
    device = rt.get_driver("local-sync").create_default_device()
    context, program = loading.load_context(modules.compiled(modules.ADD), device, None)
    exe = Executor(context, program.lookup_function("main"), device=device)
    x = aligned(4)
    y = exe(x, x)
    del exe, context, program
    gc.collect()
    assert torch.equal(y, x * 2)
    devices.check_not_forked()


def test_bad_options(path: str) -> None:
    with pytest.raises(TypeError, match=r"^copy: expected None, True or False, got 1$"):
        executor(modules.ADD, path=path, copy=1)
    with pytest.raises(TypeError, match=r"^device: expected a torch.device, str or iree.runtime.HalDevice, got int$"):
        executor(modules.ADD, path=path, device=3)
    with pytest.raises(ValueError, match=r"^torch device meta has no IREE device; supported: cpu, cuda$"):
        executor(modules.ADD, path=path, device="meta")
