# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The programs that the benchmark calls: sums of 64x64 tensors, many in and many out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import iree.runtime as rt
import torch

import iree_marshal as im
from iree_marshal import __version__
from iree_marshal.backend import cache, toolchain
from iree_marshal.bench.cases import SHAPE, Fixture

__all__ = ["Program", "load", "sums"]

FUNCTION = "main"


@dataclass(frozen=True)
class Program:
    """A loaded program.

    Attributes
    ----------
    context, function : object
        `iree.runtime.VmContext` and `VmFunction`.
    module : bytes
        The vmfb.
    inputs, results : int
        How many tensors go in and come out.
    storage : bool
        Whether it takes one more argument per result, to write it into.
    """

    context: Any
    function: Any
    module: bytes
    inputs: int
    results: int
    storage: bool

    def arguments(self, tensors: list[torch.Tensor], fixture: Fixture) -> rt.VmVariantList:
        """Import what one call takes, storage included, once."""
        storage = [torch.empty(SHAPE, device=fixture.torch) for _ in range(self.results if self.storage else 0)]
        return im.to_variant_list([*tensors[: self.inputs], *storage], device=fixture.hal)

    def invoke(self, arguments: rt.VmVariantList) -> rt.VmVariantList:
        """Call it with nothing around."""
        results = rt.VmVariantList(self.results)
        self.context.invoke(self.function, arguments, results)
        return results


def operands(result: int, inputs: int) -> tuple[int, int]:
    """Return the two inputs that a result is the sum of.

    Different results have different pairs, up to about ``inputs**2 / 2`` of them: equal ones would be computed once.
    """
    return result % inputs, (result + 1 + result // inputs) % inputs


def sums(inputs: int, results: int, *, storage: bool) -> str:
    """Write a program whose results are sums of two inputs each.

    Parameters
    ----------
    inputs, results : int
        How many.
    storage : bool
        Declare one storage argument per result.

    Returns
    -------
    str
        MLIR text.
    """
    tensor = f"tensor<{'x'.join(map(str, SHAPE))}xf32>"
    arguments = [f"%in{place}: {tensor}" for place in range(inputs)]
    if storage:
        arguments += [f"%to{place}: {tensor} {{iree.abi.output = {place} : index}}" for place in range(results)]
    pairs = [operands(place, inputs) for place in range(results)]
    body = [f"  %r{place} = arith.addf %in{a}, %in{b} : {tensor}" for place, (a, b) in enumerate(pairs)]
    types = ", ".join([tensor] * results)
    names = ", ".join(f"%r{place}" for place in range(results))
    return "\n".join(
        [
            f"func.func @{FUNCTION}({', '.join(arguments)}) -> ({types}) {{",
            *body,
            f"  return {names} : {types}",
            "}",
            "",
        ]
    )


def load(fixture: Fixture, inputs: int, results: int, *, storage: bool) -> Program:
    """Compile a program of sums, or find it in the cache, load it and check one call.

    Raises
    ------
    iree_marshal.backend.toolchain.MissingCompilerError
        No compiler is installed.
    RuntimeError
        The program returns something else than torch.
    """
    text = sums(inputs, results, storage=storage)
    flags = [flag for flag in toolchain.flags_for(fixture.torch) if not flag.startswith("--iree-input-type")]
    key = cache.key(text, [*flags, toolchain.compiler_version(), __version__, toolchain.host_cpu()])
    name = f"{inputs} sums to {results} results" + (" with storage arguments" if storage else "")
    module, _ = cache.Cache().get(key, lambda: toolchain.compile_program(text, flags, name), lambda module: None)
    instance = rt.VmInstance()
    loaded = rt.VmModule.copy_buffer(instance, module)
    context = rt.VmContext(instance, [rt.create_hal_module(instance, fixture.hal), loaded])
    program = Program(context, loaded.lookup_function(FUNCTION), module, inputs, results, storage)
    tensors = fixture.tensors(inputs)
    found = im.from_variant_list(program.invoke(program.arguments(tensors, fixture)))
    for place, result in enumerate(found):
        first, second = operands(place, inputs)
        if not torch.equal(result, tensors[first] + tensors[second]):
            raise RuntimeError(f"{name}: result {place} is wrong")
    return program
