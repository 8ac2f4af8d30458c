# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile: calls of a settled inference graph go past AOTAutograd's wrapper, where that has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Graphs, assert_same, compile_

from iree_marshal.backend import FallbackWarning, compiled, shortcut, verify


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that came through AOTAutograd's wrapper."""
    calls: list[int] = []
    call = compiled.CompiledGraph.__call__

    def counted(self: compiled.CompiledGraph, args: list[Any]) -> Sequence[Any]:
        calls.append(len(args))
        return call(self, args)

    monkeypatch.setattr(compiled.CompiledGraph, "__call__", counted)
    return calls


def _four_times(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    run = compile_(function, **options)
    for _ in range(4):
        assert_same(run(*arguments), function(*arguments))


def test_it_is_taken_from_the_third_call_on(wrapped: list[int]) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    with torch.no_grad():
        _four_times(layers, torch.randn(4, 8))
    assert len(wrapped) == 2
    _four_times(lambda x: (x + 1, (x * 2).t(), None, x.sum()), torch.randn(4, 8), verify="never")
    assert len(wrapped) == 4

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.t(), y[1:]

    run = compile_(views)
    for _ in range(4):
        results = run(torch.ones(4, 8))
        results[1][0, 1] = 7
        assert results[0][1, 0] == results[2][0, 0] == 7
    assert len(wrapped) == 6


def test_it_sees_new_weights_and_new_memory(wrapped: list[int]) -> None:
    layer = torch.nn.Linear(8, 8)
    run, x = compile_(layer), torch.randn(4, 8)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0, 4.0, 5.0):
            layer.weight.fill_(value)
            layer.bias.data = torch.full((8,), value)
            assert_same(run(x), layer(x))
    assert len(wrapped) == 2


def test_inputs_that_require_grad_and_the_grad_mode(wrapped: list[int]) -> None:
    """An inference graph with grad mode on: nothing that it returns requires grad."""
    x = torch.randn(4, 8, requires_grad=True)
    run = compile_(lambda x: (x.argmax(1), x > 0))
    for _ in range(4):
        assert_same(run(x), (x.argmax(1), x > 0))
        assert torch.is_grad_enabled()
    assert len(wrapped) == 2
    with torch.no_grad():
        assert_same(run(x), (x.argmax(1), x > 0))
        assert not torch.is_grad_enabled()


def test_the_grad_mode_is_put_back_after_an_error(wrapped: list[int], graphs: Graphs) -> None:
    run = compile_(lambda x: x.argmax())
    for _ in range(3):
        run(torch.randn(8))
    assert len(wrapped) == 2

    def fail(*arguments: Any) -> Sequence[torch.Tensor]:
        assert not torch.is_grad_enabled()
        raise RuntimeError("the device is gone")

    graphs.compiled[0]._invoke = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(torch.randn(8))
    assert torch.is_grad_enabled()
    assert len(wrapped) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mul_(2).sum(),
        lambda x: (x.t(), x + 1),
    ],
    ids=["mutation", "view_of_input"],
)
def test_wrappers_with_duties_stay(function: Callable[..., Any], wrapped: list[int]) -> None:
    run = compile_(function)
    ours, eager = torch.ones(4, 8), torch.ones(4, 8)
    for _ in range(4):
        assert_same(run(ours), function(eager))
        assert_same(ours, eager)
    assert len(wrapped) == 4


def test_dynamic_results_and_autocast_keep_it(wrapped: list[int]) -> None:
    run = compile_(lambda x: x * 2, dynamic=True)
    for rows in (3, 4, 5, 6):
        x = torch.randn(rows, 4)
        assert_same(run(x), x * 2)
    assert len(wrapped) == 4
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run, x = compile_(layer), torch.randn(4, 8)
        for _ in range(4):
            assert_same(run(x), layer(x), tolerance=2e-2)
    assert len(wrapped) == 8


def test_checked_and_eager_graphs_keep_it(wrapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    _four_times(lambda x: x + 3, torch.randn(4), verify="always")
    assert len(wrapped) == 4
    monkeypatch.setattr(compiled, "compare", lambda ours, reference: [verify.Mismatch(0, "is told to be wrong")])
    with pytest.warns(FallbackWarning, match="is told to be wrong"):
        _four_times(lambda x: x + 4, torch.randn(4), fallback=True)
    assert len(wrapped) == 8


def test_a_wrapper_that_torch_describes_otherwise_stays(wrapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "_DUTIES", (*shortcut._DUTIES, "a_duty_of_tomorrow"))
    _four_times(lambda x: x + 5, torch.randn(4))
    assert len(wrapped) == 4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda graph, args: [value.clone() for value in graph(list(args))],
        lambda graph, args: list(graph([*args]))[:1],
        lambda graph, args: graph([value.detach() for value in args]),
    ],
    ids=["copies_results", "drops_results", "exchanges_arguments"],
)
def test_a_wrapper_that_is_seen_to_do_something_stays(wrap: Any, wrapped: list[int], graphs: Graphs) -> None:
    run = compile_(lambda x: (x + 6, x * 6))
    run(torch.randn(4))
    (graph,) = graphs.compiled
    wrapped.clear()
    call = shortcut.shortened(lambda *args: wrap(graph, args), graph)
    for _ in range(3):
        call(torch.randn(4))
    assert len(wrapped) == 3
