# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is wrong with the arguments of a call: every refusal of `Executor` about its arguments is written here.

The native engine finds clean arguments by itself and comes here with all others, the portable one with every argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from iree_marshal import values
from iree_marshal.signature import OpaqueType, ScalarType, Signature, TensorType, Value

__all__ = ["count_error", "place_of", "settle"]

_MOST_SHOWN = 6


def place_of(index: int, value: Value | None) -> str:
    """Name an argument: ``argument 1 (weight)``."""
    return f"argument {index}" if value is None else f"argument {index} ({value.name})"


def count_error(signature: Signature | None, expected: Sequence[int], bound: int, got: int) -> TypeError:
    """The error of a call with too few or too many arguments.

    Parameters
    ----------
    signature : Signature, optional
        Of the function.
    expected : sequence of int
        Indices of the arguments that a call takes.
    bound, got : int
        How many arguments are bound, and how many were passed.
    """
    names = ""
    if signature is not None and expected:
        shown = [f"{signature.arguments[place].name}: {signature.arguments[place].type}" for place in expected]
        more = f", ... {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        names = f" ({', '.join(shown[:_MOST_SHOWN])}{more})"
    fixed = f" besides {bound} bound" if bound else ""
    plural = "" if len(expected) == 1 else "s"
    return TypeError(f"expected {len(expected)} argument{plural}{names}{fixed}, got {got}")


def settle(
    index: int,
    expected: Value | None,
    value: Any,
    device: torch.device,
    copy: bool | None = None,
    upload: bool = False,
) -> tuple[int, Any]:
    """Check one argument and decide what is passed for it.

    Parameters
    ----------
    index : int
        Of the argument in the function's signature.
    expected : Value, optional
        What the function takes there; `None` where there is no signature.
    value : object
        What the caller passed.
    device : torch.device
        Where tensors must be.
    copy, upload : bool
        See `iree_marshal.to_variant_list`.

    Returns
    -------
    kind, payload
        As `iree_marshal.values.admit` returns them.

    Raises
    ------
    TypeError, ValueError
        With the argument's index and name, what was expected and what was got.
    """
    if expected is None:
        return values.admit(value, (index,), device, copy, upload)
    kind = expected.abi_type
    if isinstance(kind, ScalarType):
        return _settle_scalar(index, expected, kind, value)
    if isinstance(kind, TensorType):
        return _settle_tensor(index, expected, kind, value, device, copy, upload)
    assert isinstance(kind, OpaqueType)
    return values.admit(value, (index,), device, copy, upload)


def _settle_scalar(index: int, expected: Value, kind: ScalarType, value: Any) -> tuple[int, Any]:
    try:
        number = kind.convert(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{place_of(index, expected)}: expected {kind}, got {error}") from None
    return (values.FLOAT if kind.floating else values.INT), number


def _settle_tensor(
    index: int,
    expected: Value,
    kind: TensorType,
    value: Any,
    device: torch.device,
    copy: bool | None,
    upload: bool,
) -> tuple[int, Any]:
    if isinstance(value, torch.Tensor):
        # Before a copy is made of it, and with the argument's name.
        check_tensor(index, expected, kind, value)
        if value.device != device and not (upload and value.device.type == "cpu") and value.device.type != "meta":
            hint = "; pass upload=True to copy CPU tensors there" if value.device.type == "cpu" else ""
            raise ValueError(
                f"{place_of(index, expected)}: expected a tensor on {device}, got one on {value.device}{hint}"
            )
    elif value is None or isinstance(value, (int, float, complex, str, bytes, list, tuple)):
        shown = "None" if value is None else f"{type(value).__name__} {value!r}"[:80]
        raise TypeError(f"{place_of(index, expected)}: expected {kind}, got {shown}")
    admitted, payload = values.admit(value, (index,), device, copy, upload)
    if admitted == values.TENSOR and payload is not value:
        check_tensor(index, expected, kind, payload)
    elif admitted not in (values.TENSOR, values.REF):
        raise TypeError(f"{place_of(index, expected)}: expected {kind}, got {type(value).__name__}")
    return admitted, payload


def check_tensor(index: int, expected: Value, kind: TensorType, tensor: torch.Tensor) -> None:
    """Raise `ValueError` unless the tensor's dtype and shape are what the function takes."""
    shape = tuple(tensor.shape)
    if not kind.admits(tensor.dtype, shape):
        raise ValueError(
            f"{place_of(index, expected)}: expected {kind}, got a tensor of shape {shape} and dtype {tensor.dtype}"
        )
