# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of a settled inference graph without AOTAutograd's wrapper, where that wrapper has nothing to do.

AOTAutograd wraps every graph in what some graphs need: it copies new values back into inputs, regenerates views, takes
subclasses apart, switches autocast off. Most inference graphs need none of it, and pay for it in each call, more than
for the crossing itself. Whether a graph is one of those is seen, not guessed: AOTAutograd's own description of the
graph says so, and in the first unchecked call the graph was handed exactly the objects that the wrapper was handed, and
the wrapper returned exactly the objects that the graph returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from iree_marshal.backend.compiled import CompiledGraph

# Of AOTAutograd's description of a graph: what its wrapper acts upon besides handing objects through. Each has to be
# there, so that a torch that calls it something else keeps its wrapper, and empty.
_DUTIES = (
    "mutated_inp_runtime_indices", "mutated_graph_handled_indices", "num_outputs_aliased", "num_intermediate_bases",
    "dynamic_outputs", "grad_enabled_mutation", "tokens", "is_rng_op_functionalized",
)  # fmt: skip


def is_idle_wrapper() -> bool:
    """Say whether AOTAutograd's wrapper of the graph that is being compiled will only hand objects through.

    To be asked while AOTAutograd has the graph compiled; of autocast it says nothing, which is off meanwhile.
    """
    context = torch._guards.TracingContext.try_get()
    described = None if context is None else context.fw_metadata
    if described is None:
        return False
    return not any(getattr(described, duty, True) for duty in _DUTIES)


def shortened(whole: Callable[..., Any], graph: CompiledGraph) -> Callable[..., Any]:
    """Return a function that calls `graph` in place of `whole`, once `whole` was seen to add nothing to it.

    Parameters
    ----------
    whole : callable
        The graph as AOTAutograd returned it.
    graph : CompiledGraph
        What it calls; :func:`is_idle_wrapper` has to hold for it.
    """
    run = graph.run
    is_grad_enabled = torch.is_grad_enabled
    set_grad_enabled = torch._C._set_grad_enabled
    direct: bool | None = None

    def watched(args: tuple[Any, ...]) -> Any:
        nonlocal direct
        seen: list[tuple[Sequence[Any], Sequence[Any]]] = []
        graph.observer = lambda *call: seen.append(call)
        try:
            returned = whole(*args)
        finally:
            graph.observer = None
        if seen:
            # Other threads may have called meanwhile: one of the calls that were seen is this one.
            direct = any(_same(args, given) and _same(returned, outputs) for given, outputs in seen)
        elif graph.given_up:
            direct = False
        return returned

    def call(*args: Any) -> Any:
        if not direct:
            return watched(args) if direct is None else whole(*args)
        if not is_grad_enabled():
            return run(args)
        # What the wrapper does: an inference graph may have inputs that require grad.
        set_grad_enabled(False)
        try:
            return run(args)
        finally:
            set_grad_enabled(True)

    return call


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
