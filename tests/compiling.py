# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tests of the torch.compile backend share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from iree_marshal.backend import compiled, iree_marshal, pipeline


def compile_(function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    """Compile with our backend, where a graph that runs eager is an error unless a test asks for something else."""
    torch._dynamo.reset()
    chosen = {"fallback": False, **options}
    compiled_function: Callable[..., Any] = torch.compile(
        function, backend=iree_marshal, options=chosen, dynamic=dynamic
    )
    return compiled_function


class Graphs:
    """Collects the graphs that were compiled while it is installed, and what each program was called with."""

    def __init__(self, monkeypatch: Any) -> None:
        self.compiled: list[compiled.CompiledGraph] = []
        self.eager = 0
        self.arguments: list[Sequence[Any]] = []
        build = pipeline.build

        def spy(*arguments: Any) -> Any:
            graph = build(*arguments)
            if isinstance(graph, compiled.CompiledGraph):
                self.compiled.append(graph)
                invoke = graph._invoke

                def recorded(values: Sequence[Any], *more: Any) -> Any:
                    self.arguments.append(list(values))
                    return invoke(values, *more)

                graph._invoke = recorded
            else:
                self.eager += 1
            return graph

        monkeypatch.setattr(pipeline, "build", spy)


def assert_same(ours: Any, eager: Any, tolerance: float = 1e-4) -> None:
    """Compare two structures of tensors and numbers: values, dtypes, shapes and strides."""
    left, right = tree_leaves(ours), tree_leaves(eager)
    assert len(left) == len(right)
    for place, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs, f"leaf {place}"
            continue
        assert mine.dtype == theirs.dtype, f"leaf {place}"
        assert mine.shape == theirs.shape, f"leaf {place}"
        assert mine.stride() == theirs.stride(), f"leaf {place}: strides"
        assert mine.device == theirs.device, f"leaf {place}"
        if theirs.dtype.is_floating_point or theirs.is_complex():
            wide = torch.complex128 if theirs.is_complex() else torch.float64
            torch.testing.assert_close(mine.to(wide), theirs.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(mine, theirs), f"leaf {place}"


def check(function: Callable[..., Any], *arguments: Any, tolerance: float = 1e-4, **options: Any) -> Callable[..., Any]:
    """Compile, call twice (the first call is the checked one), and compare with eager; return what was compiled."""
    run = compile_(function, **options)
    eager = function(*arguments)
    for _ in range(2):
        assert_same(run(*arguments), eager, tolerance)
    return run
