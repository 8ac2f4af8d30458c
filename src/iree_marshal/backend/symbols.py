# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes that are known only at the call, computed by one function from where their symbols are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Evaluate = Callable[[Sequence[Any]], tuple[Any, ...]]


def known(size: Any) -> Any:
    """Return a size as an integer where tracing has found out which, else as it is."""
    found = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if found is None else found


def settled(value: Any) -> Any:
    """Return a traced value with its known sizes as integers.

    A symbol that is found to be one number late in tracing stands in everything that was traced before; IREE would take
    the one for a size that it does not know, and the other for the number.
    """
    if not isinstance(value, FakeTensor):
        return known(value)
    old = (*value.shape, *value.stride())
    new = tuple(map(known, old))
    if all(one is other for one, other in zip(old, new, strict=True)):
        return value
    with value.fake_mode:
        rank = value.dim()
        return torch.empty_strided(new[:rank], new[rank:], dtype=value.dtype, device=value.device)


class Expressions:
    """Collects size expressions of one graph and compiles them into one function of the call's arguments.

    Parameters
    ----------
    placeholders : sequence
        The fake value of every argument of the call, in order: fake tensors, symbolic or plain numbers, ``None``.
    """

    def __init__(self, placeholders: Sequence[Any]) -> None:
        self._sources: dict[Any, str] = {}
        self._texts: list[str] = []
        self._slots: dict[str, int] = {}
        self._used: set[Any] = set()
        for index, value in enumerate(placeholders):
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                self._offer(value, f"args[{index}]")
        # Second, so that a symbol that comes as an argument of its own is read from there.
        for index, value in enumerate(placeholders):
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    self._offer(size, f"args[{index}].shape[{dim}]")
                for dim, stride in enumerate(value.stride()):
                    self._offer(stride, f"args[{index}].stride({dim})")

    def _offer(self, value: Any, source: str) -> None:
        expression = value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else None
        if expression is not None and expression.is_symbol:
            self._sources.setdefault(expression, source)

    def add(self, value: Any) -> int:
        """Return the place, in the evaluated tuple, of a size, plain or symbolic.

        Raises
        ------
        LookupError
            If the value depends on a symbol that no argument carries (sizes that depend on data).
        """
        from torch.utils._sympy.printers import PythonPrinter

        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = value.node.expr
            unknown = [symbol for symbol in expression.free_symbols if symbol not in self._sources]
            if unknown:
                raise LookupError(f"size {expression} depends on {unknown[0]}, which no argument carries")
            self._used.update(expression.free_symbols)
            text = str(PythonPrinter().doprint(expression))
        else:
            text = repr(value)
        if text not in self._slots:
            self._slots[text] = len(self._texts)
            self._texts.append(text)
        return self._slots[text]

    @staticmethod
    def is_static(values: Sequence[Any]) -> bool:
        """Say whether none of these sizes is symbolic."""
        return not any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in values)

    def compile(self) -> Evaluate | None:
        """Return the function from a call's arguments to all added values, or ``None`` when nothing was added."""
        if not self._texts:
            return None
        lines = ["def evaluate(args):"]
        lines += [f"    {symbol} = {self._sources[symbol]}" for symbol in sorted(self._used, key=str)]
        lines.append(f"    return ({', '.join(self._texts)},)")
        # The texts come from torch's own printer of size expressions: names of symbols, numbers and operators.
        namespace: dict[str, Any] = {"math": math, "torch": torch}
        exec(compile("\n".join(lines), "<iree_marshal sizes>", "exec"), namespace)
        evaluate: Evaluate = namespace["evaluate"]
        return evaluate
