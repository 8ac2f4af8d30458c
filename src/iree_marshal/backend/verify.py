# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compares what a compiled graph returned with what eager returns.

A clean compile and a clean run prove little: IREE 3.13 turns ResNet-50 on CUDA into a program that is off by 75 %
unless one flag is set. So the first call of every compiled graph is compared with the graph run eager on the same
inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

_EXACT = 0.0
_SINGLE = 1e-3
_HALF = 2e-2
# Half a step between neighbours, relative to the larger of them: results that round to either side are both right.
_FLOAT8 = {1: 0.5, 2: 0.25, 3: 0.125}
_ARBITER_FACTOR = 3.0
# Operators that add up products of their operands: their rounding goes by what they add, not by what is left of it.
_SUMS = frozenset(
    {
        "_adaptive_avg_pool2d", "addmm", "avg_pool2d", "baddbmm", "bmm", "convolution", "convolution_backward",
        "cumsum", "mean", "mm", "sum", "var_mean",
    }
)  # fmt: skip
# More than this is not copied for the first call, only summed up.
_SNAPSHOT_BYTES = 2**30


@dataclass(frozen=True)
class Mismatch:
    """One output that is not eager's.

    Attributes
    ----------
    output : int
        Its place among the graph's outputs.
    reason : str
        With the numbers.
    numeric : bool
        Whether it is about size of the error only, so that float64 can decide.
    """

    output: int
    reason: str
    numeric: bool = False


def tolerance(dtype: torch.dtype) -> float:
    """Return the error allowed for a dtype, as a fraction of the largest magnitude in eager's result; 0 means equal."""
    if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        return _SINGLE
    if dtype in (torch.float16, torch.bfloat16):
        return _HALF
    if dtype.is_floating_point:
        name = str(dtype)
        digits = next((count for count in _FLOAT8 if f"m{count}" in name), None)
        return _HALF if digits is None else _FLOAT8[digits]
    return _EXACT


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def error_of(ours: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute error and the largest magnitude of the reference, over finite elements.

    Elements that are not finite have to agree; where they do not, the error is infinite.
    """
    if ours.numel() == 0:
        return 0.0, 0.0
    left, right = _wide(ours), _wide(reference)
    finite = torch.isfinite(right)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    if not bool((finite | same).all()):
        return float("inf"), float("nan")
    zero = torch.zeros((), dtype=right.dtype, device=right.device)
    difference = torch.where(finite, left - right, zero).abs()
    if not bool(torch.isfinite(difference).all()):
        return float("inf"), float("nan")
    return float(difference.max()), float(torch.where(finite, right, zero).abs().max())


def compare(ours: Sequence[Any], reference: Sequence[Any]) -> list[Mismatch]:
    """Compare a graph's outputs with eager's, one by one.

    Parameters
    ----------
    ours, reference : sequence
        Tensors, numbers and ``None``, in the graph's order.

    Returns
    -------
    list of Mismatch
        Empty when all agree.
    """
    found = []
    for place, (left, right) in enumerate(zip(ours, reference, strict=True)):
        if not isinstance(right, torch.Tensor):
            if left != right:
                found.append(Mismatch(place, f"is {left!r}, eager gives {right!r}"))
            continue
        if not isinstance(left, torch.Tensor):
            found.append(Mismatch(place, f"is a {type(left).__name__}, eager gives a tensor"))
        elif left.dtype != right.dtype:
            found.append(Mismatch(place, f"has dtype {left.dtype}, eager gives {right.dtype}"))
        elif left.shape != right.shape:
            found.append(Mismatch(place, f"has shape {tuple(left.shape)}, eager gives {tuple(right.shape)}"))
        elif left is not right:
            allowed = tolerance(right.dtype)
            if allowed == _EXACT:
                wrong = int((left != right).sum()) if right.numel() else 0
                if wrong:
                    found.append(Mismatch(place, f"({right.dtype}) differs in {wrong} of {right.numel()} elements"))
                continue
            error, scale = error_of(left, right)
            if not error <= allowed * scale:
                sizes = f"off by {error:.3g} on values up to {scale:.3g}, allowed is {allowed:g} of that"
                reason = f"({right.dtype}) is {sizes}"
                found.append(Mismatch(place, reason, numeric=True))
    return found


class _InDouble(Interpreter):
    """Runs a graph with every floating dtype replaced by float64, in arguments, constants and casts alike.

    Parameters
    ----------
    graph : GraphModule
        The graph.
    noise : torch.Generator, optional
        When given, every intermediate value is moved by one unit in the last place of the dtype it really has, up or
        down at random; sums by one unit of the sum of their terms' magnitudes, times the square root of how many terms
        there are. That is what another order of the same operations may do to it.
    """

    def __init__(self, graph: GraphModule, noise: torch.Generator | None = None) -> None:
        super().__init__(graph)
        self._noise = noise

    def fetch_attr(self, target: str) -> Any:
        return _doubled(super().fetch_attr(target))

    def run_node(self, n: Node) -> Any:
        value = _doubled(super().run_node(n))
        if self._noise is None or n.op != "call_function":
            return value
        magnitude = value
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.name.split("::")[1] in _SUMS:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            magnitude = self.call_function(n.target, map_aggregate(args, _absolute), map_aggregate(kwargs, _absolute))
            count = max((one.numel() for one in args if isinstance(one, torch.Tensor)), default=1)
            magnitude = map_aggregate(magnitude, functools.partial(_grown, count=count))
        real = n.meta.get("val")
        if isinstance(value, (tuple, list)) and isinstance(real, (tuple, list)):
            return type(value)(map(self._moved, value, magnitude, real))
        return self._moved(value, magnitude, real)

    def _moved(self, value: Any, magnitude: Any, real: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not isinstance(real, torch.Tensor):
            return value
        if self._noise is None or not value.is_floating_point() or not real.dtype.is_floating_point:
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._noise, device=self._noise.device).to(value.device)
        moved = value + torch.finfo(real.dtype).eps * magnitude.abs() * (2.0 * signs - 1)
        # What is infinite has no last place; moved, it would be no number.
        return torch.where(torch.isfinite(value) & torch.isfinite(moved), moved, value)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, map_aggregate(args, _doubled), map_aggregate(kwargs, _doubled))


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _grown(value: Any, count: int) -> Any:
    """Scale the magnitude of sums over `count` terms, all sums together, as rounding errors that go either way grow."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    return value * math.sqrt(max(count / value.numel(), 1.0))


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.Tensor):
        return value.to(_doubled(value.dtype))
    if isinstance(value, (tuple, list)):
        return type(value)(_doubled(item) for item in value)
    return value


def acquit(
    graph: GraphModule, arguments: Sequence[Any], ours: Sequence[Any], eager: Sequence[Any], found: Sequence[Mismatch]
) -> list[Mismatch]:
    """Let float64 decide about errors that are too large: results that cancel are noise in eager as well.

    The gradient of a bias in front of a batch norm is zero on paper and 1e-7 in float32, of either sign, in eager too.
    A result is right when it is at most three times as far from float64 as eager's own, or as what rounding noise in
    every step makes of it.

    Parameters
    ----------
    graph : GraphModule
        The graph.
    arguments : sequence
        Of the call.
    ours, eager : sequence
        Outputs of both.
    found : sequence of Mismatch
        What :func:`compare` found.

    Returns
    -------
    list of Mismatch
        What remains, with the error against float64 added to the reason.
    """
    if not all(mismatch.numeric for mismatch in found):
        return list(found)
    wide = [_doubled(value) for value in arguments]
    try:
        with torch.no_grad():
            exact = _InDouble(graph).run(*wide)
            noisy = _InDouble(graph, torch.Generator().manual_seed(0)).run(*wide)
    except Exception:  # an operator without float64, or no memory: then the first verdict stands
        return list(found)
    remaining = []
    for mismatch in found:
        place = mismatch.output
        finite = torch.isfinite(eager[place])
        # Where float32 overflows float64 has nothing to say, and what is infinite or no number on one side only is not
        # explained by any rounding.
        truth = torch.where(finite, exact[place], _wide(eager[place]))
        error, _ = error_of(ours[place], truth)
        errors = [error_of(other[place], truth)[0] for other in (eager, noisy)]
        usual = max((one for one in errors if math.isfinite(one)), default=0.0)
        if not error <= _ARBITER_FACTOR * usual:
            reason = f"{mismatch.reason}; against float64 it is off by {error:.3g}, rounding explains {usual:.3g}"
            remaining.append(Mismatch(place, reason))
    return remaining


def _fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes, in all likelihood, when the tensor's bytes do."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat[: flat.numel() // 8 * 8].clone().view(torch.int64)
    # Sums of int64 wrap around. The weights tell elements that changed places apart.
    weights = torch.arange(1, whole.numel() + 1, device=whole.device)
    return int((whole * weights).sum()) * 31 + int(flat[whole.numel() * 8 :].sum())


class Snapshot:
    """What the tensors of a call looked like before it, to find a program that writes into its inputs, and to undo it.

    Parameters
    ----------
    tensors : sequence of Tensor
        Copied where all of them together are small enough, else only summed up.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _SNAPSHOT_BYTES
        self._copies = [tensor.detach().clone() for tensor in tensors] if whole else None
        self._sums = None if whole else [_fingerprint(tensor) for tensor in tensors]

    def changed(self) -> list[int]:
        """Return the places of the tensors that are not what they were."""
        if self._copies is None:
            sums = self._sums or []
            return [place for place, tensor in enumerate(self._tensors) if _fingerprint(tensor) != sums[place]]
        return [place for place, copy in enumerate(self._copies) if not _same_bytes(copy, self._tensors[place])]

    def restore(self) -> bool:
        """Bring the tensors back to what they were; say whether that was possible."""
        if self._copies is None:
            return False
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            # Through .data: putting old values back is no change that autograd has to hear of.
            tensor.data.copy_(copy)
        return True


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    flat = [value.detach().contiguous().view(-1).view(torch.uint8) for value in (left, right)]
    return torch.equal(*flat)
