# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""uint8 arithmetic, done in int32.

IREE 3.13 compiles uint8 as signless bytes and then divides, compares with constants, sums and sorts them as signed
ones: `x > 200` is wrong for 73 of 256 values. What computes with uint8 is therefore computed in int32 and cut back to
eight bits, which is the same arithmetic modulo 256. What only moves bytes is left alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

_MOVES = frozenset(
    {
        "_to_copy", "_unsafe_index", "_unsafe_view", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy",
        "embedding", "flip", "gather", "index", "index_select", "lift_fresh_copy", "repeat", "roll", "stack",
    }
)  # fmt: skip


def _is_unsigned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8


def _computes(node: Node) -> bool:
    """Say whether a node does arithmetic on uint8 tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not any(_is_unsigned(operand.meta.get("val")) for operand in node.all_input_nodes):
        return False
    schema = node.target._schema
    aliases = any(result.alias_info is not None for result in schema.returns)
    return not aliases and schema.name.split("::")[1] not in _MOVES


def _makes_range(node: Node) -> bool:
    """Say whether a node counts in uint8 (`torch.eye` does), which crashes the compiler."""
    if not isinstance(node.target, torch._ops.OpOverload) or not _is_unsigned(node.meta.get("val")):
        return False
    return node.target._schema.name == "aten::arange"


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


class Widening:
    """Copies nodes from one graph into another, with uint8 arithmetic done in int32.

    Parameters
    ----------
    graph : Graph
        Where nodes go.
    env : dict
        Nodes of the old graph to nodes of the new one; extended by :meth:`copy`.
    """

    def __init__(self, graph: Graph, env: dict[Node, Node]) -> None:
        self._graph = graph
        self._env = env
        self._wide: dict[Node, Node] = {}
        self._several: set[Node] = set()

    def _operand(self, node: Node) -> Node:
        copied = self._env[node]
        if not _is_unsigned(node.meta.get("val")):
            return copied
        if node not in self._wide:
            self._wide[node] = _cast(self._graph, copied, torch.int32)
        return self._wide[node]

    def copy(self, node: Node) -> None:
        """Copy one ``call_function`` node."""
        if _makes_range(node):
            counted = self._graph.node_copy(node, self._env.__getitem__)
            counted.kwargs = {**counted.kwargs, "dtype": torch.int32}
            self._narrow(node, counted, node.meta["val"])
            return
        computes = _computes(node)
        operand: Callable[[Node], Node] = self._operand if computes else self._env.__getitem__
        copied = self._graph.node_copy(node, operand)
        self._env[node] = copied
        value: Any = node.meta.get("val")
        if node.target is operator.getitem and node.args[0] in self._several and _is_unsigned(value):
            self._narrow(node, copied, value)
        elif computes and node.kwargs.get("dtype") is None:
            if _is_unsigned(value):
                self._narrow(node, copied, value)
            elif isinstance(value, (tuple, list)) and any(map(_is_unsigned, value)):
                wide = [item.to(torch.int32) if _is_unsigned(item) else item for item in value]
                self._relabel(copied, type(value)(wide))
                self._several.add(node)

    def _narrow(self, node: Node, copied: Node, value: torch.Tensor) -> None:
        self._relabel(copied, value.to(torch.int32))
        # Only the low eight bits are eager's: what comes next starts from those.
        self._env[node] = _cast(self._graph, copied, torch.uint8)

    @staticmethod
    def _relabel(node: Node, value: Any) -> None:
        # tensor_meta repeats the dtype, and the importer prefers it.
        node.meta = {key: kept for key, kept in node.meta.items() if key != "tensor_meta"}
        node.meta["val"] = value
