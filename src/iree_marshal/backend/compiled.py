# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One compiled graph: what AOTAutograd calls instead of the graph it handed over."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from iree_marshal.backend.graphs import Argument, Output, Plan
from iree_marshal.backend.options import Options
from iree_marshal.backend.runner import Invoke
from iree_marshal.backend.verify import Snapshot, acquit, compare

# What IREE returns as integers with a sign.
_WITHOUT_SIGN = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class FallbackWarning(RuntimeWarning):
    """A graph runs eager instead of through IREE; the text names the graph, the cause and the numbers."""


class MismatchError(RuntimeError):
    """A compiled graph returned something else than eager, and ``fallback=False`` was asked for."""


def warn_fallback(cause: str) -> None:
    """Give the one warning about a graph that runs eager from now on."""
    warnings.warn(f"iree_marshal: {cause}; this graph runs eager", FallbackWarning, stacklevel=2)


class EagerGraph:
    """A graph that runs as torch operators, called the way AOTAutograd calls compiled graphs."""

    def __init__(self, graph_module: GraphModule) -> None:
        # On the object, not the class: torch wraps it in a function that copies what the object's own dict says.
        self._boxed_call = True
        self._graph_module = graph_module

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph. ``args`` is emptied, so that nothing lives longer than its last use."""
        held = list(args)
        args.clear()
        outputs: Sequence[Any] = self._graph_module(*held)
        return outputs


class CompiledGraph:
    """A loaded program with its plan.

    Parameters
    ----------
    graph_module : GraphModule
        The graph as AOTAutograd gave it; runs for the comparison and in IREE's place.
    plan : Plan
        How to call the program.
    invoke : callable
        The loaded program.
    storage : bool
        Whether the program writes its results into memory that was allocated for each call.
    options : Options
        When to compare and whether to fall back.
    """

    def __init__(self, graph_module: GraphModule, plan: Plan, invoke: Invoke, storage: bool, options: Options) -> None:
        self._boxed_call = True
        self.plan = plan
        self._graph_module = graph_module
        self._invoke = invoke
        self._options = options
        self._eager: EagerGraph | None = None
        self._lock = threading.Lock()
        self._checked = options.verify == "never" and storage
        # Called with the arguments and the outputs of each unchecked call; see `shortcut`.
        self.observer: Callable[[Sequence[Any], Sequence[Any]], object] | None = None
        # Only results that IREE allocates can turn out to be an argument's memory or each other's.
        self._storage = storage
        # The executor itself makes one allocation for results of static sizes.
        self._allocates = storage and any(result.shape_slots is not None for result in plan.results)
        self._copied: tuple[int, ...] = ()
        # Most graphs return what their program does, in order: nothing to do per result.
        self._plain = plan.evaluate is None and plan.outputs == tuple(
            Output("result", place) for place in range(len(plan.results))
        )
        self._plain &= not any(result.dtype in _WITHOUT_SIGN for result in plan.results)
        count = sum(node.op == "placeholder" for node in graph_module.graph.nodes)
        self._gather = _gatherer(plan, count)

    @property
    def given_up(self) -> bool:
        """Whether the graph runs eager from now on."""
        return self._eager is not None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the program, or the graph where the program was given up. ``args`` is emptied."""
        if self._eager is not None:
            return self._eager(args)
        if self._checked and self._options.verify != "always":
            held = list(args)
            args.clear()
            outputs = self.run(held)
            observer = self.observer
            if observer is not None:
                observer(held, outputs)
            return outputs
        with self._lock:
            # Another thread may have finished the first call while we waited.
            if self._eager is None and (not self._checked or self._options.verify == "always"):
                held = list(args)
                args.clear()
                return self._run_checked(held)
        return self(args)

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run the program, unchecked."""
        plan = self.plan
        sizes = () if plan.evaluate is None else plan.evaluate(args)
        gathered = args if self._gather is None else self._gather(args, sizes)
        if self._plain and not self._copied:
            return self._invoke(gathered)
        if self._allocates:
            tensors = list(self._invoke(gathered, self._allocate(sizes)))
        else:
            tensors = list(self._invoke(gathered))
        for place in self._copied:
            tensors[place] = tensors[place].clone()
        return self._finish(args, tensors, sizes)

    def _allocate(self, sizes: Sequence[Any]) -> list[torch.Tensor]:
        """Return memory for the results of one call, whose sizes only this call knows."""
        device = self.plan.device
        return [
            torch.empty(
                result.shape if result.shape_slots is None else [sizes[slot] for slot in result.shape_slots],
                dtype=result.dtype,
                device=device,
            )
            for result in self.plan.results
        ]

    def _finish(self, args: Sequence[Any], tensors: list[torch.Tensor], sizes: Sequence[Any]) -> list[Any]:
        for place, result in enumerate(self.plan.results):
            tensor = tensors[place]
            if tensor.dtype != result.dtype:
                # IREE's results know no sign; the bytes are right.
                tensor = tensor.view(result.dtype)
            if result.slots is not None:
                values = [sizes[slot] for slot in result.slots]
                rank = len(values) // 2
                tensor = result.layout.restore(tensor, values[:rank], values[rank:])
            tensors[place] = tensor
        return [_output(output, args, tensors, sizes) for output in self.plan.outputs]

    def _run_checked(self, args: list[Any]) -> Sequence[Any]:
        """Run one call and compare it with eager; give up on IREE for this graph where it fails."""
        verify = self._options.verify != "never"
        inputs = [value for value in args if isinstance(value, torch.Tensor)]
        reference = self._graph_module(*args) if verify else None
        before = Snapshot(inputs) if verify and not self._checked else None
        try:
            if not self._storage and not self._checked:
                self._learn_aliases(args)
            ours = self.run(args)
        except Exception as error:
            return self._give_up(args, reference, f"{self.plan.name}: its first call failed: {error}", error)
        if before is not None and (changed := before.changed()):
            cause = f"{self.plan.name}: the compiled program wrote into its tensor inputs {changed}"
            if not before.restore():
                # Too large to have been copied: the caller's data is gone, and eager would compute with what is left.
                raise MismatchError(cause)
            return self._give_up(args, reference, cause, None)
        if reference is not None:
            found = compare(ours, reference)
            if found:
                found = acquit(self._graph_module, args, ours, reference, found)
            if found:
                worst = "; ".join(f"output {mismatch.output} {mismatch.reason}" for mismatch in found[:3])
                more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
                cause = f"{self.plan.name}: the compiled program is wrong: {worst}{more}"
                return self._give_up(args, reference, cause, None)
        self._checked = True
        return ours

    def _give_up(
        self, args: list[Any], reference: Sequence[Any] | None, cause: str, error: Exception | None
    ) -> Sequence[Any]:
        if not self._options.fallback:
            raise MismatchError(cause) from error
        # First, so that a warning that is turned into an error leaves the graph usable.
        self._eager = EagerGraph(self._graph_module)
        warn_fallback(cause)
        return self._eager(args) if reference is None else reference

    def _learn_aliases(self, args: list[Any]) -> None:
        """Find results that are the memory of an argument or of another result; they are copied in every call.

        The compiler may return an argument for `clone(x)`, or one buffer for two equal results. torch's caller may
        write into either. Which ones is decided when the program is compiled, so one look is enough.
        """
        sizes = () if self.plan.evaluate is None else self.plan.evaluate(args)
        gathered = args if self._gather is None else self._gather(args, sizes)
        taken = [_extent(value) for value in gathered if isinstance(value, torch.Tensor)]
        copied = []
        for place, tensor in enumerate(self._invoke(gathered)):
            # Results of one call are parts of one allocation, and a result may be part of an argument: bytes count.
            start, end = _extent(tensor)
            if any(start < other_end and other_start < end for other_start, other_end in taken):
                copied.append(place)
            taken.append((start, end))
        self._copied = tuple(copied)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last; equal for an empty one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _output(output: Output, args: Sequence[Any], tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
    if output.kind == "none":
        return None
    if output.kind == "number":
        return sizes[output.index]
    base: torch.Tensor = args[output.index] if output.kind == "argument" else tensors[output.index]
    if output.slots is not None:
        values = [sizes[slot] for slot in output.slots]
        rank = len(values) // 2
        return base.as_strided(values[:rank], values[rank : 2 * rank], base.storage_offset() + values[-1])
    return base.detach() if output.detach else base


def _gatherer(plan: Plan, count: int) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None:
    """Return the function from a call's `count` arguments and its evaluated sizes to the program's arguments.

    Constants are not among them, they are fixed. `None` where the program's arguments are the call's.
    """
    arguments = [argument for argument in plan.arguments if not argument.fixed]
    if [argument.source for argument in arguments] == list(range(count)) and not any(
        argument.permutation or argument.item or argument.copied for argument in arguments
    ):
        return None

    def one(args: Sequence[Any], sizes: Sequence[Any], argument: Argument) -> Any:
        if argument.slot is not None:
            return sizes[argument.slot]
        value: Any = argument.constant if argument.source is None else args[argument.source]
        if argument.permutation is not None:
            value = value.permute(argument.permutation)
        if argument.copied:
            return value.clone(memory_format=torch.contiguous_format)
        return value.item() if argument.item else value

    return lambda args, sizes: [one(args, sizes, argument) for argument in arguments]
