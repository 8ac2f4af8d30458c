# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Strides: which tensors are dense in another order of dimensions, and how results get eager's.

IREE knows row-major tensors only. A tensor that is dense in another order (channels_last, transposed) is row-major once
its dimensions are permuted, so it crosses as that permuted view without a copy, and the program permutes it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Permutation = tuple[int, ...]


def hint(size: Any) -> int:
    """Return a size or stride as an integer; a symbolic one as the value it was traced with."""
    if isinstance(size, torch.SymInt):
        # node.hint reads the traced value; int() would add a guard and cost the graph its dynamic shape.
        value = size.node.hint
        return 2 if value is None else int(value)
    return int(size)


def storage_order(sizes: Sequence[Any], strides: Sequence[Any]) -> Permutation | None:
    """Return the dimensions from the outermost in memory to the innermost.

    Parameters
    ----------
    sizes, strides : sequence of int or SymInt
        In elements.

    Returns
    -------
    tuple of int or None
        ``None`` unless the tensor is dense: every element of its memory range used exactly once. Row-major tensors give
        ``(0, 1, ...)``.
    """
    shape = [hint(size) for size in sizes]
    steps = [hint(stride) for stride in strides]
    rank = len(shape)
    if is_row_major(shape, steps):
        return tuple(range(rank))
    # Sorted is stable: dimensions with equal strides (one of them has size 1) keep their order.
    order = tuple(sorted(range(rank), key=lambda dim: (-steps[dim], shape[dim] == 1, dim)))
    if is_row_major([shape[dim] for dim in order], [steps[dim] for dim in order]):
        return order
    return None


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether elements follow each other in C order; strides of dimensions of size 0 or 1 do not matter."""
    if 0 in sizes:
        return True
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def row_major_strides(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides torch gives a new contiguous tensor of these sizes."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        strides.append(step)
        # torch counts a dimension of size 0 as 1 here.
        step = step * (size if not isinstance(size, int) or size > 0 else 1)
    return tuple(reversed(strides))


def inverse(permutation: Permutation) -> Permutation:
    """Return the permutation that undoes this one."""
    undone = [0] * len(permutation)
    for place, dim in enumerate(permutation):
        undone[dim] = place
    return tuple(undone)


@dataclass(frozen=True)
class ResultLayout:
    """How a program's row-major result becomes a tensor with eager's strides.

    Attributes
    ----------
    permutation : tuple of int
        Applied inside the program: the result crosses in storage order.
    expanded : tuple of int
        Dimensions with stride 0 in eager: the program hands out one slice of them.
    sizes, strides : tuple of int or SymInt
        What the tensor handed to the caller has.
    exact : bool
        Whether the row-major tensor of these sizes has these strides already: nothing to do.
    gaps : bool
        Whether eager's tensor does not use all its memory (a slice of something larger): it has to be copied into
        place.
    """

    permutation: Permutation
    expanded: tuple[int, ...]
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    exact: bool
    gaps: bool

    def restore(self, tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Return the tensor as eager would have it.

        Parameters
        ----------
        tensor : Tensor
            The program's result, row-major in storage order.
        sizes, strides : sequence of int
            :attr:`sizes` and :attr:`strides` of this call.

        Returns
        -------
        Tensor
            A view of ``tensor``, except where :attr:`gaps` says that its memory has another extent.
        """
        if not self.gaps:
            return tensor.as_strided(sizes, strides)
        target = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return target.copy_(tensor)


def result_layout(sizes: Sequence[Any], strides: Sequence[Any]) -> ResultLayout:
    """Return how to reach given strides from a row-major result; see :class:`ResultLayout`."""
    shape = [hint(size) for size in sizes]
    steps = [hint(stride) for stride in strides]
    rank = len(shape)
    identity = tuple(range(rank))
    kept = tuple(sizes), tuple(strides)
    exact = steps == [hint(step) for step in row_major_strides(shape)]
    if exact:
        return ResultLayout(identity, (), *kept, exact=True, gaps=False)
    order = storage_order(sizes, strides)
    if order is not None:
        return ResultLayout(order, (), *kept, exact=False, gaps=False)
    expanded = tuple(dim for dim in range(rank) if steps[dim] == 0 and shape[dim] > 1)
    if expanded:
        inner = [1 if dim in expanded else size for dim, size in enumerate(sizes)]
        order = storage_order(inner, strides)
        if order is not None:
            return ResultLayout(order, expanded, *kept, exact=False, gaps=False)
    # empty_strided() and copy_() need memory that no two elements share.
    overlapping = any(step == 0 and size > 1 for size, step in zip(shape, steps, strict=True))
    if overlapping:
        steps = [hint(step) for step in row_major_strides(shape)]
        return ResultLayout(identity, (), tuple(sizes), row_major_strides(sizes), exact=True, gaps=False)
    return ResultLayout(identity, (), *kept, exact=False, gaps=True)
