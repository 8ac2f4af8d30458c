# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native path against the portable one, on inputs that hypothesis makes up: value for value, error for error."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import iree_marshal as im
from iree_marshal import paths
from iree_marshal.element_types import HAL_OF

RUNS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Any view of some memory: dtype, shape, order of dimensions, steps, offset, conjugate and negative bits."""
    dtype = draw(st.sampled_from(list(HAL_OF)))
    shape = draw(shapes)
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    offset = draw(st.sampled_from([0, 0, 0, 1, 3, 16, 64]))
    full = [size * step for size, step in zip(shape, steps, strict=True)]
    order = draw(st.sampled_from([list(range(len(shape))), draw(st.permutations(range(len(shape))))]))
    base = torch.empty([full[dim] for dim in order], dtype=dtype)
    room = torch.empty(base.numel() + offset, dtype=dtype)
    content = torch.randint(0, 2 if dtype is torch.bool else 200, (room.numel() * dtype.itemsize,), dtype=torch.uint8)
    flat = torch.view_as_real(room).reshape(-1) if dtype.is_complex else room
    flat.view(torch.uint8).copy_(content)
    tensor = room[offset:].view(base.shape)
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point and dtype.itemsize >= 4 and draw(st.booleans()):
        tensor = torch._neg_view(tensor)
    return tensor


def outcome(path: str, values: list[Any], copy: bool | None, rounds: int = 1) -> Any:
    """What a crossing gives: the results' dtypes, shapes and bytes, or the error's class and words."""
    with paths.force(path):
        try:
            results = im.from_variant_list(im.to_variant_list(values, copy=copy))
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        return [describe(result) for result in results]


def describe(result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result if not isinstance(result, list) else [describe(item) for item in result]
    flat = result.reshape(-1).clone(memory_format=torch.contiguous_format)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return result.dtype, tuple(result.shape), result.stride(), bytes(flat.view(torch.uint8).tolist())


@RUNS
@given(tensor=tensors(), copy=st.sampled_from([None, None, False, True]))
def test_tensors(tensor: torch.Tensor, copy: bool | None) -> None:
    fast = outcome("fast", [tensor], copy)
    assert fast == outcome("portable", [tensor], copy)
    if isinstance(fast, list):
        resolved = tensor.resolve_conj().resolve_neg().contiguous()
        assert fast[0][:2] == (tensor.dtype, tuple(tensor.shape))
        assert fast[0][3] == describe(resolved)[3]


scalars = st.one_of(
    st.integers(-(2**65), 2**65),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=2),
    st.just({}),
    st.just(1j),
)


@RUNS
@given(values=st.lists(st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=5))
def test_structures(values: list[Any]) -> None:
    assert outcome("fast", values, None) == outcome("portable", values, None)
