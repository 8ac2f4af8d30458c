# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From the graph that AOTAutograd hands over to a program that IREE can take, and a plan of how to call it.

AOTAutograd's graph is functional, but not yet a program at IREE's border: it has `None` and integers among its outputs,
outputs that are inputs or each other, strides, unused inputs and large constants. All of that is settled here, once, so
that a call only moves tensors. The graph itself is left as it is: it is what runs when IREE cannot.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from iree_marshal.backend.layouts import ResultLayout, inverse, result_layout, storage_order
from iree_marshal.backend.symbols import Evaluate, Expressions, settled
from iree_marshal.backend.toolchain import CompileError
from iree_marshal.backend.unsigned import Widening

# Smaller constants stay in the program, where the compiler can fold them.
_LIFT_ELEMENTS = 16

# Operators whose first operand IREE updates in place. Where that operand is an argument of the program and has no other
# use, IREE 3.13 writes into the caller's memory (it makes its copy on write only for values that are used twice).
_UPDATES = frozenset(
    {
        "_index_put_impl", "_unsafe_index_put", "as_strided_scatter", "diagonal_scatter", "index_add", "index_copy",
        "index_fill", "index_put", "index_reduce", "masked_scatter", "put", "scatter", "scatter_add", "scatter_reduce",
        "select_scatter", "slice_scatter", "sort", "topk",
    }
)  # fmt: skip
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
# Operators that hand on their operand's bytes as they are, without being views in torch.
_HANDS_ON = frozenset(
    {"_reshape_copy", "_to_copy", "_unsafe_view", "clone", "contiguous", "lift_fresh_copy", "view_copy"}
)


@dataclass(frozen=True)
class Argument:
    """One argument of the program.

    Attributes
    ----------
    source : int or None
        Place among the call's arguments; ``None`` for a constant of the graph, and for what `slot` says.
    constant : Tensor or None
        That constant.
    value : object
        Fake tensor as the program sees it (permuted), or a number.
    permutation : tuple of int or None
        Set when the tensor crosses as a permuted view.
    item : bool
        Whether a 0-d CPU tensor crosses as a number (torch keeps Python floats on the CPU, next to CUDA tensors).
    copied : bool
        Whether the program may overwrite the memory it gets, and so gets a copy.
    slot : int or None
        Set for a number that is computed from sizes: its slot among the evaluated ones.
    """

    source: int | None
    constant: torch.Tensor | None
    value: Any
    permutation: tuple[int, ...] | None = None
    item: bool = False
    copied: bool = False
    slot: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether it is the same in every call: a constant that the program leaves alone."""
        return self.constant is not None and not self.copied


@dataclass(frozen=True)
class Result:
    """One tensor that the program computes.

    Attributes
    ----------
    dtype : torch.dtype
        As torch traced it.
    shape : tuple of int or SymInt
        As the program returns it: row-major in storage order.
    shape_slots : tuple of int or None
        Slots of :attr:`shape` where it is known only at the call.
    layout : ResultLayout
        How it gets eager's strides.
    slots : tuple of int or None
        Slots of eager's sizes and strides; ``None`` where nothing has to be done.
    """

    dtype: torch.dtype
    shape: tuple[Any, ...]
    shape_slots: tuple[int, ...] | None
    layout: ResultLayout
    slots: tuple[int, ...] | None


@dataclass(frozen=True)
class Output:
    """One output of the graph.

    Attributes
    ----------
    kind : str
        ``"none"``; ``"number"``: ``index`` is a slot of the evaluated sizes; ``"argument"``: the call's argument
        ``index`` itself; ``"result"``: the program's result ``index``.
    index : int
        See above.
    slots : tuple of int or None
        Set for a view: slots of its sizes, strides and storage offset (relative to what it is a view of).
    detach : bool
        Whether it is another tensor object on the same memory.
    """

    kind: str
    index: int = 0
    slots: tuple[int, ...] | None = None
    detach: bool = False


@dataclass(frozen=True)
class Plan:
    """A program and how to call it; see :func:`plan_graph`."""

    name: str
    device: torch.device
    program: GraphModule
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    outputs: tuple[Output, ...]
    evaluate: Evaluate | None
    dynamic: bool


@dataclass
class _Building:
    """What is collected while a graph is rewritten."""

    device: torch.device
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    arguments: list[tuple[Node, Argument]] = field(default_factory=list)
    places: dict[Node, int] = field(default_factory=dict)


def is_random(graph_module: GraphModule) -> bool:
    """Say whether the graph draws random numbers: IREE's would not be torch's, so such a graph runs eager."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        for node in graph_module.graph.nodes
    )


def mutated(graph_module: GraphModule) -> Node | None:
    """Return the first node that writes into one of its arguments, or ``None``; AOTAutograd leaves none by default."""
    nodes: list[Node] = list(graph_module.graph.nodes)
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return node
    return None


def device_of(graph_module: GraphModule) -> torch.device:
    """Return the device a graph runs on: of its tensor inputs, else of its results, else the active device.

    0-d CPU tensors next to CUDA ones do not count: they are Python numbers.
    """
    nodes = list(graph_module.graph.nodes)
    placeholders = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    others = [node.meta.get("val") for node in nodes if node.op != "placeholder"]
    for values in (placeholders, others):
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        for device in devices:
            if device.type != "cpu":
                return device
        if devices:
            return devices[0]
    return torch.get_default_device()


def plan_graph(graph_module: GraphModule, name: str) -> Plan:
    """Rewrite one graph of AOTAutograd into a program for IREE's importer, and plan its calls.

    Parameters
    ----------
    graph_module : GraphModule
        Functional ATen graph with fake tensors in ``meta["val"]``. Not changed.
    name : str
        For errors.

    Returns
    -------
    Plan
        With a program whose inputs are row-major tensors and numbers, and whose outputs are distinct row-major tensors.

    Raises
    ------
    CompileError
        The graph has something that no program can have; the text names graph and cause.
    """
    writer = mutated(graph_module)
    if writer is not None:
        raise CompileError(f"{name}: the graph writes into its own arguments ({writer.target} at {writer.name})")
    device = device_of(graph_module)
    nodes: list[Node] = list(graph_module.graph.nodes)
    building = _Building(device)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        building.places[node] = index
        _take_placeholder(building, node, index, device, name)
    for node in nodes:
        if node.op == "get_attr":
            _take_constant(building, node, graph_module, device, name)
    expressions = Expressions([node.meta.get("val") for node in placeholders])
    try:
        for node in nodes:
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymFloat):
                # `x / math.sqrt(x.shape[1])`: the importer knows no such arithmetic, and the call can do it.
                value = node.meta["val"]
                building.env[node] = _new_placeholder(building, None, value, slot=expressions.add(value))
    except LookupError as error:
        raise CompileError(f"{name}: {error}") from error
    widening = Widening(building.graph, building.env)
    for node in nodes:
        if node.op == "call_function":
            if node not in building.env:
                widening.copy(node)
        elif node.op not in ("placeholder", "get_attr", "output"):
            raise CompileError(f"{name}: the graph has a {node.op} node ({node.name})")
    (output,) = (node for node in nodes if node.op == "output")
    returned: Any = output.args[0]
    try:
        outputs, results, values = _plan_outputs(building, list(returned), expressions)
    except LookupError as error:
        raise CompileError(f"{name}: {error}") from error
    _forget_devices(building.graph)
    _settle_sizes(building.graph)
    building.graph.output(tuple(values))
    building.graph.eliminate_dead_code()
    kept: list[Argument] = []
    overwritten = _overwritten(building.graph)
    for node, argument in building.arguments:
        if node.users:
            kept.append(replace(argument, copied=node in overwritten))
        else:
            building.graph.erase_node(node)
    sizes = [size for argument in kept if isinstance(argument.value, torch.Tensor) for size in argument.value.shape]
    return Plan(
        name=name,
        device=device,
        program=GraphModule(graph_module, building.graph),
        arguments=tuple(kept),
        results=tuple(results),
        outputs=tuple(outputs),
        evaluate=expressions.compile(),
        dynamic=not Expressions.is_static(sizes),
    )


def _take_placeholder(building: _Building, node: Node, index: int, device: torch.device, name: str) -> None:
    value = settled(node.meta.get("val"))
    graph = building.graph
    if isinstance(value, torch.Tensor):
        if value.device != device:
            if value.dim() == 0 and value.device.type == "cpu":
                _take_number_tensor(building, node, index, value)
                return
            if node.users:
                raise CompileError(f"{name}: argument {index} is on {value.device}, the graph runs on {device}")
        if value.layout != torch.strided:
            raise CompileError(f"{name}: argument {index} has layout {value.layout}; only strided tensors can cross")
        order = storage_order(value.shape, value.stride())
        if order is not None and order != tuple(range(value.dim())):
            crossing = value.permute(order)
            inner = _new_placeholder(building, index, crossing, permutation=order)
            back = graph.call_function(torch.ops.aten.permute.default, (inner, list(inverse(order))))
            back.meta["val"] = value
            building.env[node] = back
            return
        building.env[node] = _new_placeholder(building, index, value)
        return
    if value is None or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        # A placeholder for None has no users in a functional graph, and is dropped again below.
        building.env[node] = _new_placeholder(building, index, value)
        return
    raise CompileError(f"{name}: argument {index} is a {type(value).__name__}; only tensors and numbers can cross")


def _new_placeholder(
    building: _Building, index: int | None, value: Any, permutation: tuple[int, ...] | None = None, **more: Any
) -> Node:
    node = building.graph.placeholder(f"argument_{len(building.arguments)}")
    node.meta["val"] = value
    building.arguments.append((node, Argument(index, more.pop("constant", None), value, permutation, **more)))
    return node


def _take_number_tensor(building: _Building, node: Node, index: int, value: torch.Tensor) -> None:
    """A 0-d CPU tensor in a graph of another device: a number that becomes a 0-d tensor inside the program."""
    plain = 1.0 if value.dtype.is_floating_point else 1
    inner = _new_placeholder(building, index, plain, item=True)
    full = building.graph.call_function(torch.ops.aten.full.default, ([], inner), {"dtype": value.dtype})
    full.meta["val"] = value
    building.env[node] = full


def _take_constant(building: _Building, node: Node, graph_module: GraphModule, device: torch.device, name: str) -> None:
    value: Any = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or (value.numel() <= _LIFT_ELEMENTS and value.device.type == "cpu"):
        building.env[node] = building.graph.node_copy(node)
        return
    constant = value.detach().to(device).contiguous()
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        raise CompileError(f"{name}: the constant {node.target} has no traced value")
    building.env[node] = _new_placeholder(building, None, fake.contiguous(), constant=constant)


def _forget_devices(graph: Graph) -> None:
    """Let every operator that names a device name the CPU.

    A program has one device, which its flags decide; the importer's lowerings of `empty`, `full` and others only take
    the CPU's name for it.
    """
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


def _settle_sizes(graph: Graph) -> None:
    """Let every size that tracing came to know be a number, in what is traced as in what is passed."""
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        if "val" in node.meta:
            value = settled(node.meta["val"])
            if isinstance(value, int) and not isinstance(value, bool):
                numbers[node] = value
            if value is not node.meta["val"]:
                # tensor_meta repeats the sizes, and the importer prefers it.
                node.meta = {**node.meta, "val": value}
                node.meta.pop("tensor_meta", None)
        if numbers:
            node.args = map_arg(node.args, lambda used: numbers.get(used, used))
            node.kwargs = map_arg(node.kwargs, lambda used: numbers.get(used, used))
        if node.target in _VIEWS and -1 in node.args[1]:
            node.args = (node.args[0], _without_guess(graph, node), *node.args[2:])


def _without_guess(graph: Graph, view: Node) -> list[Any]:
    """Return the sizes of a view with the one that is left to be found, -1, computed: IREE takes it for a size."""
    base: Any = view.args[0]
    sizes: list[Any] = list(view.args[1])  # type: ignore[arg-type]
    place = sizes.index(-1)
    found = view.meta["val"].shape[place]
    if not isinstance(found, torch.SymInt):
        sizes[place] = found
        return sizes
    with graph.inserting_before(view):

        def make(target: Any, value: Any, *args: Any) -> Node:
            made = graph.call_function(target, args)
            made.meta["val"] = value
            return made

        def product(factors: Sequence[Any]) -> Any:
            result: Any = 1
            for factor in factors:
                values = [one.meta["val"] if isinstance(one, Node) else one for one in (result, factor)]
                value = values[0] * values[1]
                result = make(operator.mul, value, result, factor) if isinstance(value, torch.SymInt) else value
            return result

        shape = base.meta["val"].shape
        whole = product(
            [
                make(torch.ops.aten.sym_size.int, size, base, dim) if isinstance(size, torch.SymInt) else size
                for dim, size in enumerate(shape)
            ]
        )
        rest = product([size for dim, size in enumerate(sizes) if dim != place])
        sizes[place] = make(operator.floordiv, found, whole, rest)
    return sizes


def _overwritten(graph: Graph) -> set[Node]:
    """Return the placeholders whose memory the compiled program may update in place."""
    found: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in _UPDATES:
            operand = node.args[0]
            while isinstance(operand, Node) and isinstance(operand.target, torch._ops.OpOverload):
                schema = operand.target._schema
                aliased = any(result.alias_info is not None for result in schema.returns)
                if not aliased and schema.name.split("::")[1] not in _HANDS_ON:
                    break
                operand = operand.args[0]
            if isinstance(operand, Node) and operand.op == "placeholder":
                found.add(operand)
    return found


def _viewed(node: Node) -> Node:
    """Return what a chain of views starts from, as far as strides alone describe the view."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        aliased = len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        base = node.args[0] if node.args else None
        if not aliased or not isinstance(base, Node):
            return node
        ours, theirs = node.meta.get("val"), base.meta.get("val")
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return node
        # conj(), imag() and view(dtype) read the same memory in another way.
        if ours.dtype != theirs.dtype or ours.is_conj() != theirs.is_conj() or ours.is_neg() != theirs.is_neg():
            return node
        node = base
    return node


def _is_plain_alias(node: Node, base: Node) -> bool:
    """Say whether a chain of views changes nothing but the tensor object."""
    while node is not base:
        if node.target not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return False
        (node,) = node.all_input_nodes
    return True


def _view_slots(view: torch.Tensor, base: torch.Tensor, expressions: Expressions) -> tuple[int, ...]:
    offset = view.storage_offset() - base.storage_offset()
    return tuple(expressions.add(value) for value in (*view.shape, *view.stride(), offset))


def _plan_outputs(
    building: _Building, graph_outputs: Sequence[Any], expressions: Expressions
) -> tuple[list[Output], list[Result], list[Node]]:
    """Decide for every output of the graph where it comes from, and which tensors the program computes."""
    outputs: list[Output] = []
    results: list[Result] = []
    values: list[Node] = []
    computed: dict[Node, int] = {}
    direct = {node for node in graph_outputs if isinstance(node, Node)}

    def compute(node: Node) -> int:
        if node not in computed:
            result, value = _plan_result(building, node, expressions)
            computed[node] = len(results)
            results.append(result)
            values.append(value)
        return computed[node]

    for node in graph_outputs:
        value = node.meta.get("val") if isinstance(node, Node) else node
        if value is None:
            outputs.append(Output("none"))
        elif not isinstance(value, torch.Tensor):
            outputs.append(Output("number", expressions.add(value)))
        else:
            base = _viewed(node)
            if base.op != "placeholder" and base is not node and base not in direct:
                # A view of something that only the program knows: the program computes the view.
                base = node
            place = building.places.get(base)
            kind, index = ("result", compute(base)) if place is None else ("argument", place)
            if base is node:
                outputs.append(Output(kind, index))
            elif _is_plain_alias(node, base):
                outputs.append(Output(kind, index, detach=True))
            else:
                outputs.append(Output(kind, index, _view_slots(value, base.meta["val"], expressions)))
    return outputs, results, values


def _plan_result(building: _Building, node: Node, expressions: Expressions) -> tuple[Result, Node]:
    """Plan one computed tensor; append to the program what brings it into row-major order."""
    value: torch.Tensor = node.meta["val"]
    if value.device != building.device:
        raise LookupError(f"a result is on {value.device}, the graph runs on {building.device}")
    layout = result_layout(value.shape, value.stride())
    inner = building.env[node]
    fake = value
    aten = torch.ops.aten
    for dim in layout.expanded:
        fake = aten.slice.Tensor(fake, dim, 0, 1)
        inner = building.graph.call_function(aten.slice.Tensor, (inner, dim, 0, 1))
        inner.meta["val"] = fake
    if layout.permutation != tuple(range(value.dim())):
        fake = fake.permute(layout.permutation)
        inner = building.graph.call_function(aten.permute.default, (inner, list(layout.permutation)))
        inner.meta["val"] = fake
    slots = None
    if not layout.exact:
        slots = tuple(expressions.add(size) for size in (*layout.sizes, *layout.strides))
    shape = tuple(fake.shape)
    shape_slots = None if expressions.is_static(shape) else tuple(map(expressions.add, shape))
    return Result(value.dtype, shape, shape_slots, layout, slots), inner
