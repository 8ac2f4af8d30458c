# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a call through `torch.compile` takes over the invocation of the program it compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import iree.runtime as rt
import torch

import iree_marshal as im
from iree_marshal import backend
from iree_marshal.backend import runner
from iree_marshal.bench.cases import SHAPE, Fixture
from iree_marshal.bench.harness import Case

__all__ = ["compiled_cases"]


@dataclass
class Loaded:
    """What the backend loaded, and what it passed in the last call, seen at the seam between backend and executor."""

    module: bytes = b""
    function: str = ""
    signature: str = ""
    fixed: dict[int, torch.Tensor] = field(default_factory=dict)
    passed: list[Any] = field(default_factory=list)

    def watch(self, load: Callable[..., runner.Invoke]) -> Callable[..., runner.Invoke]:
        """Wrap the backend's loader."""

        def watched(
            module: bytes,
            function: str,
            device: torch.device,
            signature: str,
            fixed: Mapping[int, torch.Tensor] | None = None,
        ) -> runner.Invoke:
            self.module, self.function, self.signature, self.fixed = module, function, signature, dict(fixed or {})
            invoke = load(module, function, device, signature, fixed)

            def call(arguments: Sequence[Any], *storage: Any) -> Sequence[torch.Tensor]:
                self.passed = list(arguments)
                return invoke(arguments, *storage)

            return call

        return watched

    def arguments(self) -> list[Any]:
        """Put fixed and passed arguments into the order of the program's."""
        passed = iter(self.passed)
        count = len(self.passed) + len(self.fixed)
        return [self.fixed[place] if place in self.fixed else next(passed) for place in range(count)]


def model(fixture: Fixture) -> torch.nn.Module:
    """Make a two-layer perceptron."""
    size = SHAPE[1]
    layers = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, size))
    return layers.to(fixture.torch).eval()


def bare(loaded: Loaded, fixture: Fixture) -> Callable[[], object]:
    """Call the compiled program with arguments imported beforehand."""
    instance = rt.VmInstance()
    module = rt.VmModule.copy_buffer(instance, loaded.module)
    context = rt.VmContext(instance, [rt.create_hal_module(instance, fixture.hal), module])
    function = module.lookup_function(loaded.function)
    storage = [torch.empty(SHAPE, device=fixture.torch)] * loaded.signature.count("iree.abi.output")
    arguments = im.to_variant_list([*loaded.arguments(), *storage], device=fixture.hal)

    def invoke() -> object:
        results = rt.VmVariantList(1)
        context.invoke(function, arguments, results)
        return results

    return invoke


def compiled_cases(fixture: Fixture) -> Iterator[Case]:
    """Time a two-layer perceptron: eager, through `torch.compile`, and its program alone."""
    torch.manual_seed(0)
    mlp, given = model(fixture), fixture.tensors(1)[0]
    name = backend.register()
    loaded = Loaded()
    options: dict[str, Any] = {"fallback": False}
    with mock.patch.object(runner, "load", loaded.watch(runner.load)):
        torch.compile(mlp, backend=name, options=options)(given)
    torch.compiler.reset()
    # Compiled anew without the watch: it must not be part of what is timed.
    ours = torch.compile(mlp, backend=name, options=options)
    if not torch.allclose(ours(given), mlp(given), rtol=1e-3, atol=1e-3):
        raise RuntimeError("the compiled perceptron is wrong")
    through_torch = torch.compile(model(fixture), backend="eager")
    through_torch(given)
    yield Case("compiled.mlp.bare", "two-layer MLP: bare `context.invoke`", bare(loaded, fixture), 1, "call")
    yield Case(
        "compiled.mlp.ours",
        'two-layer MLP: `torch.compile(backend="iree_marshal")`',
        lambda: ours(given),
        1,
        "call",
        over="compiled.mlp.bare",
    )
    yield Case(
        "compiled.mlp.eager", "two-layer MLP: eager torch", lambda: mlp(given), 1, "call", unlike="torch's kernels"
    )
    yield Case(
        "compiled.mlp.dynamo",
        'two-layer MLP: `torch.compile(backend="eager")`',
        lambda: through_torch(given),
        1,
        "call",
        unlike="torch's kernels",
        over="compiled.mlp.eager",
    )
