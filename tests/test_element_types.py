# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The table of dtypes against IREE's compiler: its numbers, and programs that insist on them."""

from __future__ import annotations

import re

import iree.runtime as rt
import modules
import pytest
import releases
import torch
from conftest import private_device

import iree_marshal as im
from iree_marshal.element_types import HAL_OF, TORCH_OF, typestr

# MLIR's names. Programs compute on integers without a sign, whatever sign a buffer view gives them.
MLIR = {
    torch.bool: "i1",
    torch.int8: "si8",
    torch.int16: "si16",
    torch.int32: "si32",
    torch.int64: "si64",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e8m0fnu: "f8E8M0FNU",
}
if releases.RELEASE < (3, 5):
    del MLIR[torch.float8_e8m0fnu]  # IREE names it from 3.5 on

SIGNLESS = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}


def numbers() -> dict[str, int]:
    """HAL's number of every MLIR type, as the compiler writes it into programs."""
    names = [*MLIR.values(), *SIGNLESS]
    kinds = ", ".join(["i32"] * len(names))
    lines = [f"  %{index} = hal.element_type<{name}> : i32" for index, name in enumerate(names)]
    handed_out = ", ".join(f"%{index}" for index in range(len(names)))
    text = "\n".join([f"func.func @main() -> ({kinds}) {{", *lines, f"  return {handed_out} : {kinds}", "}"])
    outputs = modules.Program(text, im.hal_device("cpu")).invoke(im.to_variant_list([]))
    return dict(zip(names, [value % 2**32 for value in im.from_variant_list(outputs)], strict=True))


def test_numbers_are_the_compilers() -> None:
    compiled = numbers()
    assert {dtype: compiled[name] for dtype, name in MLIR.items()} == {dtype: HAL_OF[dtype] for dtype in MLIR}
    assert {compiled[name]: dtype for name, dtype in SIGNLESS.items()} == {
        number: dtype for number, dtype in TORCH_OF.items() if HAL_OF[dtype] != number
    }


def test_table_goes_both_ways() -> None:
    assert {dtype: TORCH_OF[number] for dtype, number in HAL_OF.items()} == {dtype: dtype for dtype in HAL_OF}
    assert {dtype: number & 0xFF for dtype, number in HAL_OF.items()} == {dtype: dtype.itemsize * 8 for dtype in HAL_OF}


@pytest.mark.parametrize("dtype", list(HAL_OF), ids=str)
def test_typestr_is_numpys(dtype: torch.dtype) -> None:
    try:
        name = torch.empty(1, dtype=dtype).numpy().dtype.str
    except TypeError:
        name = None
    assert typestr(dtype) == name


# The second half of the argument: IREE copies it, so that the result is memory of its own.
HALF = """
func.func @main(%a: tensor<8x{0}>) -> tensor<4x{0}> {{
  %0 = tensor.extract_slice %a[4] [4] [1] : tensor<8x{0}> to tensor<4x{0}>
  return %0 : tensor<4x{0}>
}}
"""


def raw(tensor: torch.Tensor) -> list[int]:
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    return flat.view(torch.uint8).tolist()


def filled(dtype: torch.dtype) -> torch.Tensor:
    """Eight elements of any bits at all."""
    tensor = torch.empty(8, dtype=dtype)
    flat = torch.view_as_real(tensor).reshape(-1) if dtype.is_complex else tensor
    flat.view(torch.uint8).copy_(torch.randint(0, 2 if dtype is torch.bool else 256, (8 * dtype.itemsize,)))
    return tensor


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", list(MLIR), ids=str)
def test_programs_insist_on_the_type_and_keep_the_bytes(dtype: torch.dtype, driver: str) -> None:
    device = private_device(driver)
    signless = re.sub(r"^[su]i(?=\d)", "i", MLIR[dtype])
    program = modules.Program(HALF.format(signless), device, "main", "--iree-input-demote-f64-to-f32=false")
    tensor = filled(dtype)
    outputs = program.invoke(im.to_variant_list([tensor], device=device))
    (result,) = im.from_variant_list(outputs, device=device)
    assert result.dtype is SIGNLESS.get(signless, dtype)
    assert raw(result) == raw(tensor[4:])
    assert result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    # IREE takes integers and bools of one width for each other, and nothing else.
    alike = {kind for kind in HAL_OF if is_integer(kind)} if is_integer(dtype) else {dtype}
    others = [kind for kind in HAL_OF if kind.itemsize == dtype.itemsize and kind not in alike]
    assert others or dtype is torch.complex128
    for other in others:
        with pytest.raises(ValueError, match=rf"expected \w+ \([0-9a-f]+\) but have [\w*]+ \({HAL_OF[other]:x}\)"):
            program.invoke(im.to_variant_list([filled(other)], device=device))


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


@pytest.mark.usefixtures("path")
def test_iree_sees_the_number_of_the_table() -> None:
    text = """
    func.func @main(%v: !hal.buffer_view) -> i32 {
      %0 = hal.buffer_view.element_type<%v : !hal.buffer_view> : i32
      return %0 : i32
    }"""
    program = modules.Program(text, im.hal_device("cpu"))
    for dtype, number in HAL_OF.items():
        variants = im.to_variant_list([filled(dtype)])
        (seen,) = im.from_variant_list(program.invoke(variants))
        assert seen % 2**32 == number
        assert int(variants.get_as_object(0, rt.HalBufferView).element_type) == number
