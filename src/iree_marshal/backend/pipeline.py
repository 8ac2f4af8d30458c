# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The straight line from one graph of AOTAutograd to something that can be called in its place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from iree_marshal import __version__
from iree_marshal.backend import cache as disk
from iree_marshal.backend import runner
from iree_marshal.backend.compiled import CompiledGraph, EagerGraph, warn_fallback
from iree_marshal.backend.graphs import Plan, is_random, plan_graph
from iree_marshal.backend.importer import FUNCTION, import_graph
from iree_marshal.backend.options import Options
from iree_marshal.backend.progress import log
from iree_marshal.backend.shortcut import is_idle_wrapper
from iree_marshal.backend.signatures import signature_of
from iree_marshal.backend.toolchain import (
    CompileError,
    MissingCompilerError,
    compile_program,
    compiler_version,
    flags_for,
    host_cpu,
)

_numbers = itertools.count()
# Numbers of results for which storage arguments pay on CUDA. Measured on an H200, whole call: 2 results 87 us against
# 225, 8: 96 against 180, 32: 248 against 359, 100: 731 against 834; one result 74 against 67, and 450 on the far side
# as well. On the CPU they save nothing (2, 40 and 450 results: the same within 2 %), and cost an import each.
_STORAGE_RESULTS = range(2, 129)


def name_of(graph_module: GraphModule, kind: str) -> str:
    """Return a name a user can find again: number, kind, size, and the source line of the first operator."""
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    traces = (re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "") for node in calls)
    # Of a stack's frames the last one is the user's; those before it are wrappers around the model's forward.
    place = next((trace[-1] for trace in traces if trace), None)
    where = f", {Path(place[0]).name}:{place[1]}" if place else ""
    return f"graph {next(_numbers)} ({kind}, {len(calls)} operators{where})"


def compiler_for(
    kind: str, options: Options, built: list[CompiledGraph | None] | None = None
) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """Return the function that AOTAutograd calls with each graph of one kind.

    Parameters
    ----------
    kind : str
        ``"forward"``, ``"backward"`` or ``"inference"``.
    options : Options
        The user's choices.
    built : list, optional
        Receives every graph that was compiled, or `None` where AOTAutograd's wrapper has something to do for it.
    """

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = build(graph_module, kind, options)
        if built is not None:
            short = options.verify != "always" and is_idle_wrapper()
            built.append(graph if isinstance(graph, CompiledGraph) and short else None)
        return graph

    return compile_graph


def build(graph_module: GraphModule, kind: str, options: Options) -> CompiledGraph | EagerGraph:
    """Compile and load one graph, or return it as it is where IREE cannot have it.

    Raises
    ------
    CompileError
        With ``fallback=False``.
    MissingCompilerError
        IREE's compiler is not installed.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    name = name_of(graph_module, kind)
    if is_random(graph_module):
        log.info("%s draws random numbers: it runs eager, so that seeds mean what they mean in torch", name)
        return EagerGraph(graph_module)
    try:
        with _disable_current_modes():
            plan = plan_graph(graph_module, name)
            if not plan.results:
                log.debug("%s computes nothing: it runs eager", name)
                return EagerGraph(graph_module)
            storage = _wants_storage(plan) if options.storage is None else options.storage
            invoke = load_plan(plan, storage, options)
            return CompiledGraph(graph_module, plan, invoke, storage, options)
    except MissingCompilerError:
        raise
    except Exception as error:
        cause = error if isinstance(error, CompileError) else CompileError(f"{name}: {type(error).__name__}: {error}")
        if not options.fallback:
            raise cause from error
        warn_fallback(str(cause))
        return EagerGraph(graph_module)


def _wants_storage(plan: Plan) -> bool:
    return plan.device.type != "cpu" and len(plan.results) in _STORAGE_RESULTS


def compile_cached(plan: Plan, program: str, options: Options, check: Callable[[bytes], None] | None = None) -> bytes:
    """Return the module of an imported program, from the disk cache where it is there.

    Parameters
    ----------
    plan : Plan
        Gives the name and the device.
    program : str
        MLIR text.
    options : Options
        More flags; whether to use the cache.
    check : callable, optional
        Loads the module; raises when the runtime refuses it, and then it is not kept.

    Raises
    ------
    CompileError
        The compiler refuses the program, or whatever ``check`` raises.
    """
    flags = (*flags_for(plan.device), *options.flags)
    checked = check or (lambda module: None)

    def build_module() -> bytes:
        return compile_program(program, flags, f"{plan.name} for {plan.device.type}")

    if not options.cache:
        module = build_module()
        checked(module)
        return module
    key = disk.key(program, [*flags, compiler_version(), __version__, host_cpu()])
    module, hit = disk.Cache().get(key, build_module, checked)
    log.debug("%s: %s", plan.name, "found in the cache" if hit else "compiled")
    return module


def load_plan(plan: Plan, storage: bool, options: Options) -> runner.Invoke:
    """Import, compile (or find in the cache) and load a planned program.

    Raises
    ------
    CompileError
        The importer, the compiler or the runtime refuses it.
    """
    signature = signature_of(plan, storage=storage)
    fixed = {
        place: argument.constant
        for place, argument in enumerate(plan.arguments)
        if argument.fixed and argument.constant is not None
    }
    loaded: list[runner.Invoke] = []

    def check(module: bytes) -> None:
        try:
            loaded[:] = [runner.load(module, FUNCTION, plan.device, signature, fixed=fixed)]
        except Exception as error:
            raise CompileError(f"{plan.name}: the compiled module does not load: {error}") from error

    compile_cached(plan, import_graph(plan.program, plan.name, storage=storage), options, check)
    return loaded[0]
