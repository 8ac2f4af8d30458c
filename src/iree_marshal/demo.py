# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""ResNet-50 through IREE, as a program of its own and through torch.compile, with what the crossing costs.

    python -m iree_marshal demo [--device cpu|cuda] [--runs 10] [--rounds 40]

The model is transformers' ``ResNetModel`` with its default configuration and random weights of a fixed seed: nothing is
downloaded. Its 265 weights and the image are arguments of the IREE program, so that every call passes 266 tensors. The
crossing is measured in the same process on the same tensors, every round times every way once, and medians are shown.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import iree_marshal
from iree_marshal import devices

_SEED = 0
_ALLOWED_ERROR = 1e-3
_IMAGE = (1, 3, 224, 224)


@dataclass(frozen=True)
class Program:
    """ResNet-50 as a loaded IREE program.

    Attributes
    ----------
    context, function : object
        ``iree.runtime.VmContext`` and ``VmFunction``.
    arguments : list of Tensor
        The weights and, last, the image.
    """

    context: Any
    function: Any
    arguments: list[torch.Tensor]


def say(text: str) -> None:
    """Print one line of what is going on, at once."""
    print(text, flush=True)


def build_model(device: torch.device) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return ResNet-50 with the seed's weights, in eval mode and without gradients, and an image."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise SystemExit("the demo needs transformers: pip install 'iree_marshal[demo]'") from error
    torch.manual_seed(_SEED)
    model: torch.nn.Module = transformers.ResNetModel(transformers.ResNetConfig()).eval().requires_grad_(False)
    image = torch.randn(_IMAGE)
    return model.to(device), image.to(device)


def compile_program(model: torch.nn.Module, image: torch.Tensor) -> Program:
    """Export the model, compile it with every weight as an argument, and load it.

    Raises
    ------
    iree_marshal.backend.CompileError
        The compiler refused the model.
    """
    from iree_marshal.backend.decompositions import table
    from iree_marshal.backend.graphs import plan_graph
    from iree_marshal.backend.importer import FUNCTION, import_graph
    from iree_marshal.backend.options import Options
    from iree_marshal.backend.pipeline import compile_cached
    from iree_marshal.backend.progress import Progress

    device = image.device
    with Progress("tracing ResNet-50"), warnings.catch_warnings():
        # torch's export warns about its own use of its own trees.
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(model, (image,), strict=False).run_decompositions(table())
    plan = plan_graph(exported.graph_module, "ResNet-50")
    tensors: dict[str, Any] = {**exported.state_dict, **exported.constants}
    every = [image if spec.target is None else tensors[spec.target] for spec in exported.graph_signature.input_specs]
    arguments = [every[argument.source] for argument in plan.arguments if argument.source is not None]
    module = compile_cached(plan, import_graph(plan.program, plan.name, storage=False), Options())

    runtime: Any = importlib.import_module("iree.runtime")
    instance = runtime.VmInstance()
    loaded = runtime.VmModule.copy_buffer(instance, module)
    hal = runtime.create_hal_module(instance, iree_marshal.hal_device(device))
    context = runtime.VmContext(instance, [hal, loaded])
    return Program(context, loaded.lookup_function(FUNCTION), arguments)


def call(program: Program) -> list[Any]:
    """Run the program once: 266 tensors in, two out."""
    runtime: Any = importlib.import_module("iree.runtime")
    arguments = iree_marshal.to_variant_list(program.arguments, device=program.arguments[-1].device)
    results = runtime.VmVariantList(2)
    program.context.invoke(program.function, arguments, results)
    return iree_marshal.from_variant_list(results)


def relative_error(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute error over all outputs, each relative to its largest magnitude in the reference."""
    worst = 0.0
    for left, right in zip(ours, reference, strict=True):
        if left.shape != right.shape or left.dtype != right.dtype or not bool(torch.isfinite(left).all()):
            return float("inf")
        worst = max(worst, float((left - right).abs().max() / right.abs().max()))
    return worst


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; CPU work is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return how long one call takes, results dropped inside, the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def interleaved(ways: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each way; every round runs every way once, so that all meet the same machine."""
    for work in ways.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in ways.items():
                taken[name].append(seconds(work, device))
    finally:
        if enabled:
            gc.enable()
    return {name: statistics.median(values) for name, values in taken.items()}


def crossing_ways(program: Program) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return the ways to pass the program's tensors in and out, and why some cannot be measured.

    Returns
    -------
    ways : dict
        Name to a function that makes one crossing, from tensors to a list of variants or back.
    missing : dict
        Name to the reason, for stock ways that fail on this device.
    """
    runtime: Any = importlib.import_module("iree.runtime")
    dlpack: Any = importlib.import_module("torch.utils.dlpack")
    tensors = program.arguments
    torch_device = tensors[-1].device
    device = iree_marshal.hal_device(torch_device)
    results = runtime.VmVariantList(2)
    program.context.invoke(program.function, iree_marshal.to_variant_list(tensors, device=torch_device), results)
    kind, index = (1, 0) if torch_device.type == "cpu" else (2, torch_device.index or 0)

    def stock_in() -> object:
        variants = runtime.VmVariantList(len(tensors))
        for tensor in tensors:
            variants.push_ref(device.from_dlpack_capsule(dlpack.to_dlpack(tensor)))
        return variants

    def stock_protocol_in() -> object:
        variants = runtime.VmVariantList(len(tensors))
        for tensor in tensors:
            variants.push_ref(device.from_dlpack_capsule(tensor.__dlpack__()))
        return variants

    def ours_in() -> object:
        return iree_marshal.to_variant_list(tensors, device=torch_device)

    def stock_out() -> object:
        views = [results.get_as_object(place, runtime.HalBufferView) for place in range(len(results))]
        return [dlpack.from_dlpack(device.create_dlpack_capsule(view, kind, index)) for view in views]

    def ours_out() -> object:
        return iree_marshal.from_variant_list(results)

    ways: dict[str, Callable[[], object]] = {
        "in, stock: to_dlpack + from_dlpack_capsule + push_ref": stock_in,
        "in, stock: __dlpack__ + from_dlpack_capsule + push_ref": stock_protocol_in,
        "in, iree_marshal.to_variant_list": ours_in,
        "out, stock: create_dlpack_capsule + from_dlpack": stock_out,
        "out, iree_marshal.from_variant_list": ours_out,
    }
    missing = {}
    for name, work in list(ways.items()):
        try:
            work()
        except Exception as error:
            if "stock" not in name:
                raise
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            del ways[name]
    return ways, missing


def show_crossing(program: Program, rounds: int) -> float:
    """Measure and print the crossing's table; return our seconds per call, in and out together."""
    device = program.arguments[-1].device
    ways, missing = crossing_ways(program)
    say(f"measuring the crossing: {rounds} rounds, {len(program.arguments)} tensors in, 2 out")
    medians = interleaved(ways, rounds, device)
    invoke = statistics.median(seconds(lambda: call(program), device) for _ in range(5))
    say("")
    say(f"{'crossing, one call':<58} {'us':>9} {'ns/tensor':>10} {'% of call':>10}")
    for name, taken in medians.items():
        count = len(program.arguments) if name.startswith("in") else 2
        say(f"{name:<58} {taken * 1e6:9.1f} {taken / count * 1e9:10.0f} {taken / invoke * 100:10.2f}")
    for name, reason in missing.items():
        say(f"{name:<58} fails: {reason}")
    ours = {name: taken for name, taken in medians.items() if "stock" not in name}
    for direction in ("in", "out"):
        mine = next(taken for name, taken in ours.items() if name.startswith(direction))
        for name, taken in medians.items():
            if name.startswith(direction) and name not in ours:
                say(f"  {name}: {taken / mine:.1f} times ours")
    say(f"whole call through IREE: {invoke * 1e3:.1f} ms")
    return sum(ours.values())


def run_compiled(model: torch.nn.Module, image: torch.Tensor, runs: int, crossing: float) -> float:
    """Run the model through ``torch.compile`` beside eager, and print each run.

    Parameters
    ----------
    model, image : Module, Tensor
        What runs.
    runs : int
        Timed calls of each, taking turns.
    crossing : float
        Seconds that passing the tensors takes, from the table.

    Returns
    -------
    float
        The error of the compiled model, see :func:`relative_error`.
    """
    from iree_marshal import backend

    device = image.device
    say("")
    say('torch.compile(model, backend="iree_marshal")')
    compiled = torch.compile(model, backend=backend.register())
    start = time.perf_counter()
    output = compiled(image)
    synchronize(device)
    say(f"  warm-up: {time.perf_counter() - start:.1f} s (trace, compile or find in the cache, check against eager)")
    reference = model(image)
    error = relative_error(
        [output.last_hidden_state, output.pooler_output], [reference.last_hidden_state, reference.pooler_output]
    )
    say(f"  {'run':>3} {'iree_marshal':>15} {'eager':>12} {'crossing':>12} {'share':>9}")
    pairs = []
    for run in range(1, runs + 1):
        ours, eager = seconds(lambda: compiled(image), device), seconds(lambda: model(image), device)
        pairs.append((ours, eager))
        share = crossing / ours * 100
        say(f"  {run:>3} {ours * 1e3:12.1f} ms {eager * 1e3:9.1f} ms {crossing * 1e6:9.1f} us {share:7.3f} %")
    if pairs:
        ours, eager = (statistics.median(values) for values in zip(*pairs, strict=True))
        say(f"  median {ours * 1e3:9.1f} ms {eager * 1e3:9.1f} ms")
        say("  (the speed of the compiled code is IREE's; ours is the way in and out)")
    return error


def verdict(name: str, error: float) -> bool:
    """Print whether an error is allowed, and return it."""
    right = error <= _ALLOWED_ERROR
    word = "right" if right else "WRONG"
    say(f"{word}: {name}: largest error against eager {error:.2e} of the largest value (allowed {_ALLOWED_ERROR:g})")
    return right


def pick_device(asked: str) -> torch.device:
    """Return the device to run on: the one asked for, else CUDA where there is one."""
    if asked != "auto":
        return torch.device(asked)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m iree_marshal demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: CUDA where there is one)")
    parser.add_argument("--runs", type=int, default=10, help="timed calls of the model (default 10)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the crossing's table (default 40)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments of the command line; ``sys.argv`` by default.

    Returns
    -------
    int
        0, or 1 where the result is not eager's.
    """
    chosen = parse(argv)
    logging.basicConfig(format="%(message)s")
    device = pick_device(chosen.device)
    torch.manual_seed(_SEED)
    # torch's convolutions on a GPU round float32 to TF32 unless told not to, which alone is an
    # error of 1e-3; what is compared here is float32 against float32.
    torch.backends.cudnn.allow_tf32 = False
    say(f"building ResNet-50 (random weights, seed {_SEED}) on {device}")
    model, image = build_model(device)
    with torch.inference_mode(False), torch.no_grad(), devices.current(device):
        eager_output = model(image)
        eager = [eager_output.last_hidden_state, eager_output.pooler_output]
        say("compiling it with IREE, every weight an argument (about 20 s the first time, then from the cache)")
        program = compile_program(model, image)
        right = verdict("the program's call", relative_error(call(program), eager))
        crossing = show_crossing(program, chosen.rounds)
        right &= verdict("torch.compile", run_compiled(model, image, chosen.runs, crossing))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
