# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every row of the element table, on both paths: what an element becomes, and the exact words of each refusal."""

from __future__ import annotations

import math
import re
from typing import Any

import iree.runtime as rt
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import iree_marshal as im
from iree_marshal.element_types import HAL_OF

pytestmark = pytest.mark.usefixtures("path")


class Plain(torch.Tensor):
    """A subclass that stores its elements like any tensor."""


class Wrapper(torch.Tensor):
    """A subclass without storage."""

    @staticmethod
    def __new__(cls: type[Wrapper]) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("no operator may be run on it")


class Adoptable:
    """Knows only DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def cross(values: list[Any], **options: Any) -> list[Any]:
    return im.from_variant_list(im.to_variant_list(values, **options))


def raw(tensor: torch.Tensor) -> list[int]:
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).tolist()


def refused(error: type[Exception], text: str, values: list[Any], **options: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        im.to_variant_list(values, **options)


@pytest.mark.parametrize("dtype", list(HAL_OF), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (0, 3), (2, 1, 3, 2)], ids=str)
def test_every_dtype_crosses_byte_for_byte(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = torch.empty(shape, dtype=dtype)
    if count:
        target = torch.view_as_real(tensor).reshape(-1) if dtype.is_complex else tensor.reshape(-1)
        target.view(torch.uint8).copy_(content)
    (result,) = cross([tensor])
    assert result.dtype is dtype
    assert result.shape == tensor.shape
    assert raw(result) == raw(tensor)
    assert count == 0 or result.data_ptr() == tensor.data_ptr()


def test_scalars_and_structure() -> None:
    tensor = torch.ones(4)
    values = [3, True, 2.5, [tensor, [4]], (5,), []]
    assert [value for value in cross(values) if not isinstance(value, list)] == [3, 1, 2.5]
    nested = cross(values)[3]
    assert torch.equal(nested[0], tensor)
    assert nested[1] == [4]
    assert cross(values)[4:] == [[5], []]


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_extreme_integers(value: int) -> None:
    assert cross([value]) == [value]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_integers_beyond_64_bits(value: int) -> None:
    refused(ValueError, f"element 1: {value} does not fit a signed 64-bit integer", [0, value])


def test_special_floats() -> None:
    values = cross([math.inf, -0.0, math.nan])
    assert values[0] == math.inf
    assert math.copysign(1, values[1]) == -1
    assert math.isnan(values[2])


def test_numpy_scalars() -> None:
    values = [np.int8(-3), np.uint64(7), np.bool_(True), np.float32(0.1), np.float64(0.1)]
    assert cross(values) == [-3, 7, 1, float(np.float32(0.1)), 0.1]
    refused(TypeError, "element 0: expected a torch.Tensor", [np.complex64(1)])
    refused(TypeError, "element 0: expected a torch.Tensor", [np.longdouble("0.1")])
    refused(ValueError, "element 0: 18446744073709551615 does not fit", [np.uint64(2**64 - 1)])


def test_runtime_objects_pass_as_they_are() -> None:
    tensor = torch.arange(16.0)
    first = im.to_variant_list([tensor])
    view = first.get_as_object(0, rt.HalBufferView)
    fence = rt.HalFence(1)
    values = cross([view, view.get_buffer(), fence, first, first.get_as_ref(0)])
    assert values[0].data_ptr() == tensor.data_ptr()
    assert isinstance(values[1], rt.HalBuffer)
    assert values[1].byte_length() == 64
    assert isinstance(values[2], rt.HalFence)
    assert values[3][0].data_ptr() == tensor.data_ptr()
    assert values[4].data_ptr() == tensor.data_ptr()


def test_null_reference() -> None:
    values = im.to_variant_list([None, 1, [None]])
    assert im.from_variant_list(values) == [None, 1, [None]]
    assert cross([values, None]) == [[None, 1, [None]], None]


class Pretending:
    """Has the attribute of a reference, but no reference."""

    __iree_vm_ref__ = 3


class Failing:
    @property
    def __iree_vm_ref__(self) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize("value", [rt.VmRef, rt.HalBufferView, Pretending(), Pretending])
def test_what_only_looks_like_a_reference(value: Any) -> None:
    refused(TypeError, "element 1: expected a torch.Tensor", [1, value])


def test_reference_that_fails() -> None:
    refused(TypeError, "element 1: the Failing gives no reference: not today", [1, Failing()])


def test_hal_array_shares_memory() -> None:
    tensor = torch.arange(16.0)
    (array,) = im.from_variant_list(im.to_variant_list([tensor]), as_arrays=True)
    assert cross([array])[0].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("value", "name"), [(object(), "object"), ("text", "str"), (b"bytes", "bytes"), ({}, "dict"), (1j, "complex")]
)
def test_other_classes(value: Any, name: str) -> None:
    refused(
        TypeError,
        "element 1: expected a torch.Tensor, int, bool, float, None, list, tuple, numpy array, object with __dlpack__ "
        f"or __cuda_array_interface__, or a reference of iree.runtime, got {name}",
        [1, value],
    )


def test_place_in_nested_lists() -> None:
    refused(TypeError, "element 2[1][0]: expected", [1, 2, [3, [object()]]])


def test_list_that_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    refused(ValueError, "element 1: lists nested deeper than 64, or a list that contains itself", [0, loop])


@pytest.mark.parametrize("values", [torch.ones(3), "abc", b"abc", {"a": 1}, {1}])
def test_one_value_instead_of_a_sequence(values: Any) -> None:
    with pytest.raises(TypeError, match=r"^values: expected a sequence of values, got one \w+; wrap it in a list"):
        im.to_variant_list(values)


def test_any_iterable() -> None:
    assert im.from_variant_list(im.to_variant_list(iter([1, 2]))) == [1, 2]


# ---- autograd -------------------------------------------------------------------------------


def test_requires_grad() -> None:
    tensor = torch.ones(4, requires_grad=True)
    text = (
        "element 0: the Tensor requires grad while grad mode is on, and IREE would cut the graph; pass tensor.detach() "
        "or call under torch.no_grad()"
    )
    refused(ValueError, text, [tensor])
    refused(ValueError, "element 0: the Parameter requires grad", [torch.nn.Linear(4, 2).weight])
    with torch.no_grad():
        assert cross([tensor])[0].data_ptr() == tensor.data_ptr()
    with torch.inference_mode():
        assert cross([tensor])[0].data_ptr() == tensor.data_ptr()
    assert cross([tensor.detach()])[0].data_ptr() == tensor.data_ptr()
    assert not cross([tensor.detach()])[0].requires_grad


def test_inference_tensor() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
    assert torch.equal(cross([tensor])[0], torch.ones(4))


# ---- views ----------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["conj", "conj imag", "neg", "neg of one element"])
def test_conjugate_and_negative_views(view: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    tensor = {
        "conj": z.conj(),
        "conj imag": z.conj().imag,
        "neg": torch._neg_view(torch.arange(16.0)),
        "neg of one element": torch._neg_view(torch.ones(1)),
    }[view]
    assert tensor.is_conj() or tensor.is_neg()
    (result,) = cross([tensor])
    assert not result.is_conj()
    assert not result.is_neg()
    assert torch.equal(result, tensor.resolve_conj().resolve_neg())
    kind = "conjugate view" if tensor.is_conj() else "negative view"
    refused(ValueError, f"element 0: copy=False, but a copy is needed: {kind}", [tensor], copy=False)


@pytest.mark.parametrize(
    ("make", "strides"),
    [
        (lambda: torch.arange(12.0).reshape(3, 4).t(), "(1, 4)"),
        (lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), "(48, 1, 12, 3)"),
        (lambda: torch.ones(1, 4).expand(3, 4), "(0, 1)"),
        (lambda: torch.arange(24.0).reshape(4, 6)[:, ::2], "(6, 2)"),
    ],
)
def test_not_contiguous(make: Any, strides: str) -> None:
    tensor = make()
    shape = tuple(tensor.shape)
    (result,) = cross([tensor])
    assert torch.equal(result, tensor)
    assert result.is_contiguous()
    text = f"element 1: copy=False, but a copy is needed: not contiguous; shape {shape}, strides {strides}"
    refused(ValueError, text, [1, tensor], copy=False)


@pytest.mark.parametrize("copy", [None, False])
def test_strides_of_sizes_0_and_1_do_not_matter(copy: bool | None) -> None:
    tensor = torch.empty_strided((1, 4, 1), (77, 1, 99))
    tensor.copy_(torch.arange(4.0).reshape(1, 4, 1))
    (result,) = cross([tensor], copy=copy)
    assert result.data_ptr() == tensor.data_ptr()
    assert torch.equal(result, tensor)
    assert cross([torch.empty_strided((0, 3), (1, 5))], copy=copy)[0].shape == (0, 3)


def test_unaligned() -> None:
    tensor = torch.arange(64.0)[1:33]
    (result,) = cross([tensor])
    assert torch.equal(result, tensor)
    assert result.data_ptr() % 64 == 0
    text = (
        "element 0: copy=False, but a copy is needed: memory not aligned to 64 bytes (address % 64 = 4); shape (32,), "
        "strides (1,)"
    )
    refused(ValueError, text, [tensor], copy=False)
    aligned = torch.arange(64.0)[16:32]
    assert cross([aligned], copy=False)[0].data_ptr() == aligned.data_ptr()


def test_copy_true_always_copies() -> None:
    tensor = torch.arange(16.0)
    (result,) = cross([tensor], copy=True)
    assert result.data_ptr() != tensor.data_ptr()
    assert torch.equal(result, tensor)


def test_copy_is_checked() -> None:
    with pytest.raises(TypeError, match=r"^copy: expected None, True or False, got 1$"):
        im.to_variant_list([], copy=1)  # type: ignore[arg-type]


# ---- tensors without memory --------------------------------------------------------------------


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(3))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(3, device="meta"), "got a Tensor that is a meta tensor"),
        (lambda: torch.ones(3).to_sparse(), "got a Tensor that is of layout torch.sparse_coo"),
        (lambda: torch.ones(3).to_mkldnn(), "got a Tensor that is of layout torch._mkldnn"),
        (_fake, "got a FakeTensor that is a subclass without storage of its own"),
        (_functional, "got a Tensor that is a functional tensor"),
    ],
)
def test_no_dense_memory(make: Any, text: str) -> None:
    refused(TypeError, f"element 0: expected a dense tensor with memory, {text}", [make()])


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_quantized() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
    refused(TypeError, "element 0: expected a dense tensor with memory, got a Tensor that is quantized", [tensor])


def test_wrapper_subclass() -> None:
    with pytest.raises(TypeError, match=r"^element 1: .*Wrapper"):
        im.to_variant_list([1, Wrapper()])


def test_subclass_with_storage() -> None:
    tensor = torch.arange(16.0).as_subclass(Plain)
    (result,) = cross([tensor])
    assert type(result) is torch.Tensor
    assert result.data_ptr() == tensor.data_ptr()


def test_inside_torch_func() -> None:
    seen: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match=r"^element 0: .*wrapped by torch.func"):
            im.to_variant_list([x])
        seen.append("refused")
        return x

    torch.func.vmap(function)(torch.ones(2, 3))
    assert seen == ["refused"]


def test_storage_that_does_not_hold_the_view() -> None:
    refused(
        ValueError,
        "element 0: the Tensor of shape (3,) has no memory (null data pointer)",
        [torch._efficientzerotensor((3,))],
    )
    emptied = torch.ones(32)
    emptied.untyped_storage().resize_(0)
    refused(ValueError, "element 0: the Tensor of shape (32,) has no memory (null data pointer)", [emptied])
    shrunk = torch.ones(32)
    shrunk.untyped_storage().resize_(64)
    refused(ValueError, "element 0: the Tensor of shape (32,) ends at byte 128 of a storage of 64", [shrunk])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_dtypes_without_element_type() -> None:
    refused(
        TypeError, "element 0: HAL has no element type for torch.complex32", [torch.zeros(2, dtype=torch.complex32)]
    )
    refused(TypeError, "element 1: HAL has no element type for torch.uint1", [0, torch.empty(2, dtype=torch.uint1)])
    packed = torch.empty(2, dtype=torch.float4_e2m1fn_x2)
    refused(TypeError, "element 0: HAL has no element type for torch.float4_e2m1fn_x2", [packed])


# ---- numpy and other libraries ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "uint64", "float16", "float64", "complex64"])
def test_numpy(dtype: str) -> None:
    array = np.arange(64).reshape(8, 8).astype(dtype)
    (result,) = cross([array])
    assert np.array_equal(result.numpy(), array)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_numpy_extension_types(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.0, 2.0, 4.0], dtype=getattr(ml_dtypes, name))
    (result,) = cross([array])
    assert result.dtype is getattr(torch, name)
    assert raw(result) == list(array.tobytes())


def test_numpy_extension_scalars() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert cross([ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(-0.5)]) == [1.5, -0.5]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: np.zeros(16, [("tag", "i1"), ("value", "<i4")])["value"], "strides that are no multiple"),
        (lambda a: a[::-1], "negative strides"),
        (lambda a: a.astype(">f4"), "foreign byte order"),
        (lambda a: np.frombuffer(a.tobytes(), np.float32), "read-only"),
    ],
)
def test_numpy_that_torch_cannot_stand(change: Any, reason: str) -> None:
    array = change(np.arange(32, dtype=np.float32))
    (result,) = cross([array])
    assert result.tolist() == array.tolist()
    refused(ValueError, f"element 0: copy=False, but a copy is needed: numpy array with {reason}", [array], copy=False)


def test_numpy_fortran_order() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    assert np.array_equal(cross([array])[0].numpy(), array)
    refused(ValueError, "element 0: copy=False, but a copy is needed: not contiguous", [array], copy=False)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.array([1], "M8[s]")])
def test_numpy_dtypes_without_tensor(array: np.ndarray[Any, Any]) -> None:
    refused(TypeError, f"element 0: torch has no dtype for a numpy array of {array.dtype}", [array])


def test_dlpack_objects() -> None:
    tensor = torch.arange(16.0)
    assert cross([Adoptable(tensor)])[0].data_ptr() == tensor.data_ptr()


def test_dlpack_objects_that_fail() -> None:
    class Broken:
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    refused(TypeError, "element 0: torch cannot adopt the Broken: not today", [Broken()])


# ---- devices --------------------------------------------------------------------------------------


def test_device_arguments() -> None:
    tensor = torch.arange(16.0)
    for device in ("cpu", torch.device("cpu"), im.hal_device("cpu")):
        assert cross([tensor], device=device)[0].data_ptr() == tensor.data_ptr()
    with pytest.raises(TypeError, match=r"^device: expected a torch.device, str or iree.runtime.HalDevice, got int"):
        im.to_variant_list([tensor], device=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^torch device meta has no IREE device; supported: cpu, cuda"):
        im.to_variant_list([tensor], device="meta")


def test_the_results_argument() -> None:
    with pytest.raises(TypeError, match=r"^variants: expected an iree.runtime.VmVariantList, got list"):
        im.from_variant_list([1])  # type: ignore[arg-type]


def test_element_type_without_dtype() -> None:
    view = im.to_variant_list([torch.arange(16.0)]).get_as_object(0, rt.HalBufferView)
    variants = rt.VmVariantList(2)
    variants.push_int(1)
    variants.push_ref(rt.HalBufferView(view.get_buffer(), [128], 0x10000004))
    with pytest.raises(TypeError, match=r"^element 1: torch has no dtype for the HAL element type 0x10000004$"):
        im.from_variant_list(variants)
