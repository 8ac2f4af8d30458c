# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The one table of dtypes: torch's, HAL's element types, and the names in array interfaces.

A HAL element type is a number: the numerical type in the top byte, the bit count in
the lowest one. The values are those of `iree.runtime.HalElementType`, the same in all
releases (float8_e8m0fnu has a name there from 3.5 on).
"""

from __future__ import annotations

import sys

import torch

__all__ = ["HAL_OF", "TORCH_OF", "typestr"]

# dtype, HAL element type, typestr without byte order ("" where array interfaces have no name).
_TABLE: tuple[tuple[torch.dtype, int, str], ...] = (
    (torch.bool, 0x13000008, "b1"),
    (torch.int8, 0x11000008, "i1"),
    (torch.int16, 0x11000010, "i2"),
    (torch.int32, 0x11000020, "i4"),
    (torch.int64, 0x11000040, "i8"),
    (torch.uint8, 0x12000008, "u1"),
    (torch.uint16, 0x12000010, "u2"),
    (torch.uint32, 0x12000020, "u4"),
    (torch.uint64, 0x12000040, "u8"),
    (torch.float16, 0x21000010, "f2"),
    (torch.float32, 0x21000020, "f4"),
    (torch.float64, 0x21000040, "f8"),
    (torch.bfloat16, 0x22000010, ""),
    (torch.complex64, 0x23000040, "c8"),
    (torch.complex128, 0x23000080, "c16"),
    (torch.float8_e5m2, 0x24000008, ""),
    (torch.float8_e4m3fn, 0x25000008, ""),
    (torch.float8_e5m2fnuz, 0x26000008, ""),
    (torch.float8_e4m3fnuz, 0x27000008, ""),
    (torch.float8_e8m0fnu, 0x28000008, ""),
)

HAL_OF: dict[torch.dtype, int] = {dtype: element_type for dtype, element_type, _ in _TABLE}
"""HAL element type of every torch dtype that can cross."""

# Results of compiled functions carry integers without a sign: they come back as signed ones.
_SIGNLESS = {
    0x10000008: torch.int8,
    0x10000010: torch.int16,
    0x10000020: torch.int32,
    0x10000040: torch.int64,
}

TORCH_OF: dict[int, torch.dtype] = {element_type: dtype for dtype, element_type, _ in _TABLE} | _SIGNLESS
"""torch dtype of every HAL element type that can cross."""

_TYPESTR = {dtype: name for dtype, _, name in _TABLE if name}


def typestr(dtype: torch.dtype) -> str | None:
    """Name of a dtype in ``__array_interface__`` and ``__cuda_array_interface__``; `None` where they have none."""
    name = _TYPESTR.get(dtype)
    if name is None:
        return None
    if name.endswith("1"):
        return "|" + name
    return ("<" if sys.byteorder == "little" else ">") + name
