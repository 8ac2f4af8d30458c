# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""FX graph to MLIR text, by the importer that ships with IREE's compiler."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from iree_marshal.backend.toolchain import CompileError, require_compiler

FUNCTION = "main"


def import_graph(graph_module: torch.fx.GraphModule, name: str, *, storage: bool) -> str:
    """Turn a functional ATen graph into an MLIR module of the torch dialect.

    Parameters
    ----------
    graph_module : torch.fx.GraphModule
        Placeholders and outputs carry fake tensors or symbolic integers in ``meta["val"]``; outputs are tensors.
    name : str
        The graph's name, for errors.
    storage : bool
        Whether results are written into tensors that the caller passes: one more argument per result, in order, and no
        results. See :func:`_write_results_into_arguments`.

    Returns
    -------
    str
        The program; its function is called ``main``.

    Raises
    ------
    CompileError
        The importer does not know an operator, a type or a kind of argument; names graph and cause.
    """
    require_compiler()
    fx_importer: Any = importlib.import_module("iree.compiler.extras.fx_importer")
    ir: Any = importlib.import_module("iree.compiler.ir")
    try:
        importer = fx_importer.FxImporter()
        function = importer.import_graph_module(graph_module, func_name=FUNCTION)
        with importer.module_op.context, ir.Location.unknown():
            # torch traced these shapes: sizes that it calls equal are equal, and broadcasting was made explicit.
            function.attributes["torch.assume_strict_symbolic_shapes"] = ir.UnitAttr.get()
            if storage:
                _write_results_into_arguments(function, ir)
        importer.module_op.verify()
        return str(importer.module_op)
    except Exception as error:  # the importer raises KeyError, AssertionError, ... for what it does not know
        raise CompileError(f"{name}: IREE's importer refused it: {type(error).__name__}: {error}") from error


def _write_results_into_arguments(function: Any, ir: Any) -> None:
    """Make every result one more argument, a mutable tensor that the function overwrites.

    ``{iree.abi.output}`` is what IREE has for this, but on functions of the torch dialect it compiles and is silently
    dropped. A mutable ``!torch.tensor`` argument with ``torch.overwrite.tensor.contents`` is honoured down to the last
    copy: the producing dispatch writes into the caller's buffer.
    """
    block = function.regions[0].blocks[0]
    terminator = list(block.operations)[-1]
    values = list(terminator.operands)
    inputs = [argument.type for argument in block.arguments]
    unknown = ir.Location.unknown()
    with ir.InsertionPoint(terminator):
        for value in values:
            mutable = ir.Type.parse(str(value.type).replace("!torch.vtensor", "!torch.tensor", 1))
            target = block.add_argument(mutable, unknown)
            inputs.append(mutable)
            ir.Operation.create("torch.overwrite.tensor.contents", results=[], operands=[value, target])
        ir.Operation.create("func.return", results=[], operands=[])
    terminator.erase()
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, []))
