# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``torch.compile(model, backend="iree_marshal")``: PyTorch programs compiled by IREE.

AOTAutograd traces forward and backward graphs; each is decomposed, planned (:mod:`.graphs`), imported to MLIR
(:mod:`.importer`), compiled by ``iree-compile`` in a child process (:mod:`.toolchain`), kept on disk (:mod:`.cache`),
loaded and, at its first call, compared with eager (:mod:`.verify`). A graph that fails on the way runs eager, with one
warning.

torch finds :func:`iree_marshal` through the entry point group ``torch_dynamo_backends``: nothing has to be imported.
IREE's compiler is imported when the first graph is compiled; it comes with the extra ``iree_marshal[compile]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from iree_marshal.backend.compiled import CompiledGraph, FallbackWarning, MismatchError
from iree_marshal.backend.options import Options
from iree_marshal.backend.toolchain import CompileError, MissingCompilerError

__all__ = [
    "CompileError",
    "FallbackWarning",
    "MismatchError",
    "MissingCompilerError",
    "Options",
    "iree_marshal",
    "register",
]


def iree_marshal(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that dynamo captured; the function ``torch.compile`` calls.

    Parameters
    ----------
    graph_module : torch.fx.GraphModule
        Dynamo's graph.
    example_inputs : sequence
        Its fake inputs.
    options : mapping, optional
        See :class:`Options`: ``verify``, ``fallback``, ``flags``, ``storage``, ``cache``.
    mode : str, optional
        ``torch.compile``'s mode. Only the default exists here.

    Returns
    -------
    callable
        The compiled graph with its AOTAutograd wrapper.

    Raises
    ------
    MissingCompilerError
        IREE's compiler is not installed.
    CompileError
        With ``fallback=False``: the graph does not compile or load.
    ValueError
        Unknown option or mode.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from iree_marshal.backend.decompositions import table
    from iree_marshal.backend.pipeline import compiler_for
    from iree_marshal.backend.shortcut import shortened
    from iree_marshal.backend.toolchain import require_compiler

    if mode not in (None, "default"):
        raise ValueError(f"iree_marshal backend: torch.compile mode {mode!r} is not supported; leave it out")
    require_compiler()
    chosen = Options.parse(options)
    inferred: list[CompiledGraph | None] = []
    backend: Any = aot_autograd(
        fw_compiler=compiler_for("forward", chosen),
        bw_compiler=compiler_for("backward", chosen),
        inference_compiler=compiler_for("inference", chosen, inferred),
        # Saves fewer tensors for the backward pass than the default: each of them crosses the border twice.
        partition_fn=min_cut_rematerialization_partition,
        decompositions=table(),
    )
    # The fused attention kernels that torch would pick have no counterpart in IREE's importer, nor a decomposition of
    # their backward; traced with the plain one, attention is matrix products and a softmax.
    with sdpa_kernel(SDPBackend.MATH):
        compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    (graph,) = inferred if len(inferred) == 1 else (None,)
    # AOTAutograd's wrapper also switches autocast off, where it was on.
    return compiled if graph is None or torch._C._is_any_autocast_enabled() else shortened(compiled, graph)


def register() -> str:
    """Make the name known to torch in a process where the package runs from its sources, without its entry point.

    Returns
    -------
    str
        The name, ``"iree_marshal"``.
    """
    import torch._dynamo

    name = "iree_marshal"
    if name not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(iree_marshal, name=name)
    return name
