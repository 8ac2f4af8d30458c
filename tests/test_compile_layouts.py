# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Strides and size expressions of the torch.compile backend, without a compiler."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from iree_marshal.backend import layouts
from iree_marshal.backend.symbols import Expressions

_shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def _dense(draw: st.DrawFn) -> torch.Tensor:
    """A tensor whose memory is row-major in some order of its dimensions."""
    shape = draw(_shapes)
    order = draw(st.permutations(range(len(shape))))
    return torch.arange(math.prod(shape)).view(shape).permute(order)


@settings(max_examples=200, deadline=None)
@given(_dense())
def test_a_dense_tensor_is_row_major_in_storage_order(tensor: torch.Tensor) -> None:
    order = layouts.storage_order(tensor.shape, tensor.stride())
    assert order is not None
    crossing = tensor.permute(order)
    assert crossing.is_contiguous()
    assert crossing.data_ptr() == tensor.data_ptr()
    assert torch.equal(crossing.permute(layouts.inverse(order)), tensor)


@settings(max_examples=200, deadline=None)
@given(_dense(), st.lists(st.sampled_from(["slice", "expand", "step"]), max_size=2), st.data())
def test_a_row_major_result_gets_eagers_strides(tensor: torch.Tensor, changes: list[str], data: st.DataObject) -> None:
    eager = tensor
    for change in changes:
        if eager.dim() and change != "expand":
            dim = data.draw(st.integers(0, eager.dim() - 1))
            eager = eager.narrow(dim, 0, max(eager.shape[dim] - 1, 0)) if change == "slice" else eager[..., ::2]
        elif eager.dim() < 4:
            eager = eager.unsqueeze(0).expand(3, *eager.shape)
    layout = layouts.result_layout(eager.shape, eager.stride())
    # What the program does: one slice of the expanded dimensions, then storage order, row-major.
    crossing = eager
    for dim in layout.expanded:
        crossing = crossing.narrow(dim, 0, 1)
    crossing = crossing.permute(layout.permutation).contiguous()
    ours = crossing if layout.exact else layout.restore(crossing, layout.sizes, layout.strides)
    assert torch.equal(ours, eager)
    overlapping = any(step == 0 and size > 1 for size, step in zip(eager.shape, eager.stride(), strict=True))
    assert ours.stride() == eager.stride() or (overlapping and layout.exact)


def test_row_major_strides_are_torchs() -> None:
    for shape in itertools.product(range(4), repeat=3):
        assert layouts.row_major_strides(shape) == torch.empty(shape).stride()


def test_sizes_are_computed_from_where_their_symbols_are() -> None:
    environment = ShapeEnv()
    rows, columns = (
        environment.create_symintnode(
            environment.create_symbol(
                hint, source=torch._dynamo.source.ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC
            ),
            hint=hint,
        )
        for name, hint in (("a", 6), ("b", 10))
    )
    with torch._subclasses.FakeTensorMode(shape_env=environment):
        tensor = torch.empty_strided((rows, columns), (columns, 1))
    expressions = Expressions([rows, tensor])
    places = [expressions.add(value) for value in (rows * columns, 7, columns // 2, rows, rows * columns)]
    evaluate = expressions.compile()
    assert evaluate is not None
    values = evaluate([8, torch.empty(8, 12)])
    assert [values[place] for place in places] == [96, 7, 6, 8, 96]
    assert places[0] == places[4]
