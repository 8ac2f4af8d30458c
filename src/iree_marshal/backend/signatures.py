# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The signature of a compiled graph, in the grammar of ``iree.abi.declaration``.

Modules that come through the torch importer carry no reflection, so the executor learns from us what it may pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from iree_marshal.backend.graphs import Plan
from iree_marshal.backend.importer import FUNCTION
from iree_marshal.backend.toolchain import CompileError

# Result types are signless in IREE: uint8 and int8 are both i8, and the backend views the result as what torch traced.
_ELEMENT_NAMES: dict[str, str] = {
    "bool": "i1",
    "uint8": "i8",
    "int8": "i8",
    "uint16": "i16",
    "int16": "i16",
    "uint32": "i32",
    "int32": "i32",
    "uint64": "i64",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e4m3fnuz": "f8E4M3FNUZ",
    "float8_e5m2": "f8E5M2",
    "float8_e5m2fnuz": "f8E5M2FNUZ",
    "float8_e8m0fnu": "f8E8M0FNU",
}


def tensor_type(shape: Sequence[Any], dtype: torch.dtype) -> str:
    """Return ``tensor<2x?xf32>``; symbolic sizes are ``?``."""
    element = _ELEMENT_NAMES.get(str(dtype).removeprefix("torch."))
    if element is None:
        raise CompileError(f"no IREE element type for {dtype}")
    sizes = [str(size) if isinstance(size, int) else "?" for size in shape]
    return f"tensor<{'x'.join([*sizes, element])}>"


def signature_of(plan: Plan, *, storage: bool) -> str:
    """Return the declaration of a plan's program.

    Parameters
    ----------
    plan : Plan
        The plan.
    storage : bool
        Whether results go into arguments; these follow the inputs.
    """
    inputs = []
    for argument in plan.arguments:
        value = argument.value
        if isinstance(value, torch.Tensor):
            inputs.append(tensor_type(value.shape, value.dtype))
        else:
            inputs.append("f64" if isinstance(value, (float, torch.SymFloat)) else "i64")
    results = [tensor_type(result.shape, result.dtype) for result in plan.results]
    if storage:
        inputs += [f"{result} {{iree.abi.output = {place} : index}}" for place, result in enumerate(results)]
    arguments = ", ".join(f"%input{place}: {text}" for place, text in enumerate(inputs))
    returned = ", ".join(f"%output{place}: {text}" for place, text in enumerate(results))
    return f"sync func @{FUNCTION}({arguments}) -> ({returned})"
