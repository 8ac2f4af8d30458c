# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile: what can go in and come out of a graph."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Graphs, assert_same, check, compile_

from iree_marshal.backend import FallbackWarning


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


def test_floats_and_ints_of_every_call_count(graphs: Graphs) -> None:
    """C12: the second float onwards is a 0-d float64 tensor, the second int a symbolic integer."""
    run = compile_(lambda x, s: x * s)
    x = torch.randn(4, 4)
    for scale in (2.0, 3.0, -0.5, 2, 3, 4):
        assert_same(run(x, scale), x * scale)
    assert len(graphs.compiled) == 3  # 2.0, any float, any int
    assert not graphs.eager


def test_dynamic_sizes_compile_once(graphs: Graphs) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        return x.t() * x.shape[0], x.shape[0] * x.shape[1] + 1, (x + 1).t(), x.sum(0), torch.cat([x, x], 1)

    run = compile_(function, dynamic=True)
    for rows, columns in ((3, 5), (9, 4), (64, 33), (5, 3)):
        x = torch.randn(rows, columns)
        assert_same(run(x), function(x))
    assert len(graphs.compiled) == 1


def test_an_int_that_only_shapes_use(graphs: Graphs) -> None:
    def function(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unsqueeze(0).expand(count, 4).reshape(-1) + count

    run = compile_(function, dynamic=True)
    x = torch.randn(4)
    for count in (3, 5, 8):
        assert_same(run(x, count), function(x, count))
    assert len(graphs.compiled) == 1


def test_none_passthrough_duplicate_and_view_outputs() -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        y = x * 2
        return x, y, None, y, x.t(), x.shape[0], y.detach(), (x[1:], "text")

    x = torch.randn(4, 6)
    run = check(function, x)
    outputs = run(x)
    assert outputs[0] is x
    assert outputs[4].data_ptr() == x.data_ptr()


def test_no_result_may_share_memory_with_an_input_or_another_result() -> None:
    """The compiler folds clone(x) to x and equal results to one buffer; the caller may write into either."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clone(), x + 1, x + 1, x.clone(), x[1:3].clone(), x.view(-1)[64:].clone()

    x = torch.randn(4, 64)
    for storage in (False, True):
        run = compile_(function, storage=storage)
        for _ in range(2):
            before, outputs = x.clone(), run(x)
            for output in outputs:
                kept = [other.clone() for other in outputs if other is not output]
                output.add_(1)
                assert torch.equal(x, before)
                assert all(map(torch.equal, kept, [other for other in outputs if other is not output]))


def test_zero_one_and_several_results() -> None:
    """C38."""
    x = torch.randn(3)
    assert compile_(lambda x: None)(x) is None
    assert_same(compile_(lambda x: x.argmax())(x), x.argmax())
    assert isinstance(compile_(lambda x: (x + 1,))(x), tuple)
    assert_same(compile_(lambda x: [x + 1, {"k": x.sum()}])(x), [x + 1, {"k": x.sum()}])


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64, torch.bfloat16, torch.float16],
    ids=str,
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(-60 if dtype.is_signed else 0, 60).to(dtype)
    check(lambda x: (x + x, x.view(-1, 10).t()), x, tolerance=1e-2 if dtype.itemsize == 2 else 1e-6)


def test_uint8_keeps_its_upper_half() -> None:
    """IREE's bytes have no sign: on its own it compiles comparison, division, sum and sort of uint8 as signed."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        moved = torch.cat([x, y]).flip(0).view(2, -1)
        shares = x / y, x % y, torch.div(x, y, rounding_mode="trunc"), x * 1.5
        return x + 1, x > 200, x == 200, x.sum(), x.sort(), x.amax(), -x, (x + 200) // 3, moved, *shares

    x = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    y = torch.randint(1, 255, (256,)).to(torch.uint8)
    check(function, x, y)


def test_bool_in_and_out() -> None:
    x = torch.tensor([True, False, True])
    check(lambda x: (~x, x.to(torch.float32), x & x.flip(0)), x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_in(dtype: torch.dtype) -> None:
    """C21: all byte values that are numbers arrive as what they are."""
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    x = torch.where(bytes_.float().isfinite(), bytes_.float(), torch.zeros(())).to(dtype)
    check(lambda x: x.to(torch.float32) * 2, x, tolerance=0)


def test_rank_zero_and_empty() -> None:
    """C15, C17."""
    check(lambda x: (x * 2, x.unsqueeze(0)), torch.tensor(3.0))
    check(lambda x: x + 1, torch.empty(0, 8))
    check(lambda x: torch.cat([x, torch.ones(2, 8)]), torch.empty(0, 8))


def test_result_strides_are_eagers() -> None:
    """C39."""
    x = torch.randn(4, 6)
    check(lambda x: (x * 2).t(), x)
    check(lambda x: (x * 2)[:, ::2], x)
    check(lambda x: (x * 2).sum(0, keepdim=True).expand(5, 6), x)
    check(lambda x: (x * 2).view(1, 4, 6).transpose(0, 2), x)
    check(lambda x: x * 2, torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last))
    check(lambda x: torch.relu(x).permute(2, 0, 1), torch.randn(2, 3, 4))


def test_dense_inputs_cross_in_storage_order_without_a_copy(graphs: Graphs) -> None:
    x = torch.randn(2, 3, 8, 4).to(memory_format=torch.channels_last)
    check(lambda x: x * 2 + 1, x)
    crossed = graphs.arguments[-1][0]
    assert crossed.data_ptr() == x.data_ptr()
    assert crossed.is_contiguous()
    assert crossed.shape == (2, 8, 4, 3)
    y = torch.randn(6, 4).t()
    check(lambda y: y @ y.t(), y)
    assert graphs.arguments[-1][0].data_ptr() == y.data_ptr()


def test_sliced_and_unaligned_inputs() -> None:
    base = torch.randn(65, 8)
    check(lambda x: x * 2, base[1:])
    check(lambda x: x * 2, base[:, ::2])
    check(lambda x: x * 2, base.view(-1)[1:513].view(64, 8))


def test_unused_inputs_and_large_constants(graphs: Graphs) -> None:
    table = torch.randn(100, 8)

    def function(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x + table[3:4] + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    check(function, torch.randn(4, 8), torch.randn(1000))
    assert all(value.numel() != 1000 for value in graphs.arguments[-1])


def test_mutated_inputs() -> None:
    """AOTAutograd computes the new value and copies it back."""

    def function(x: torch.Tensor, cache: torch.Tensor, position: int) -> torch.Tensor:
        x.mul_(2)
        cache[:, position : position + 1] = x.sum(1, keepdim=True)
        return cache.sum(1) + x.sum()

    run = compile_(function)
    ours, eager = (torch.zeros(4, 8), torch.ones(4, 6)), (torch.zeros(4, 8), torch.ones(4, 6))
    for position in (0, 1, 2, 3):
        assert_same(run(*ours, position), function(*eager, position))
        assert_same(ours, eager)
        ours[0].add_(position)
        eager[0].add_(position)


_ROWS = torch.tensor([1, 3])


@pytest.mark.parametrize(
    "update",
    [
        lambda x, v: x.index_put((_ROWS,), v),
        lambda x, v: x.slice_scatter(v, 0, 1, 3),
        lambda x, v: x.view(4, 4, 64).slice_scatter(v[:1].expand(4, 1, 64), 1, 1, 2),
        lambda x, v: x.scatter_add(0, torch.tensor([[0] * 64, [5] * 64]), v),
        lambda x, v: x.index_add(0, _ROWS, v),
        lambda x, v: x.select_scatter(v[0], 0, 1),
        lambda x, v: x.sort(1)[0],
        lambda x, v: x.clone().index_put((_ROWS,), v),
        lambda x, v: (x.index_put((_ROWS,), v) + x, x.sum()),
    ],
    ids=[
        "index_put",
        "slice_scatter",
        "through_view",
        "scatter_add",
        "index_add",
        "select_scatter",
        "sort",
        "clone",
        "twice",
    ],
)
def test_inputs_are_not_written_into(update: Any) -> None:
    """C02: IREE's scatters update a tensor argument's memory in place where it has no other use."""
    x, values = torch.randn(16, 64), torch.randn(2, 64)
    before = x.clone()
    check(update, x, values)
    assert torch.equal(x, before)


def test_random_graphs_run_eager_without_a_word(graphs: Graphs, recwarn: pytest.WarningsRecorder) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    run = compile_(function)
    x = torch.randn(8, 8)
    torch.manual_seed(3)
    ours = run(x)
    torch.manual_seed(3)
    assert_same(ours, function(x))
    assert graphs.eager
    assert not graphs.compiled
    assert not [warning for warning in recwarn if warning.category is FallbackWarning]


def test_parameters_with_and_without_grad_mode() -> None:
    """C24."""
    layer = torch.nn.Linear(4, 2)
    run = compile_(layer)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_same(run(x), layer(x))
    with torch.inference_mode():
        assert_same(run(x), layer(x))
    assert_same(run(x).detach(), layer(x).detach())
    layer.weight.data = torch.randn(2, 4)
    with torch.no_grad():
        assert_same(run(x), layer(x))
        layer.weight.add_(1)
        assert_same(run(x), layer(x))


def test_complex_and_conjugate_inputs_are_right_or_said_so() -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    run = compile_(lambda x: x * 2 + x.real.sum(), fallback=True)
    for value in (x, x.conj()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = run(value)
        assert_same(ours.resolve_conj(), (value * 2 + value.real.sum()).resolve_conj())


def test_storage_results_are_written_where_torch_allocated_them(graphs: Graphs) -> None:
    run = compile_(lambda x: (x * 2, (x + 1).t(), x.sum()), storage=True)
    x = torch.randn(16, 16)
    for _ in range(3):
        assert_same(run(x), (x * 2, (x + 1).t(), x.sum()))
    first, second = run(x)[0], run(x + 1)[0]
    assert_same(first, x * 2)
    assert_same(second, (x + 1) * 2)


def test_a_constant_that_is_updated_is_the_same_in_every_call() -> None:
    table = torch.zeros(16, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0] * 8] * 16).index_put((_ROWS,), x) + table.sum()

    run = compile_(function)
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 8), value)
        assert_same(run(x), function(x))
