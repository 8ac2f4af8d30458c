# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a second GPU does to the first: marshaling while it works, and how much both do together.

python -m benchmarks.two_gpus [--quick]

Keeps ``benchmarks/results/two_gpus.json``; exits non-zero where marshaling takes more than 1.1 times as long beside a
busy GPU, or two GPUs do less than 1.9 times what one does.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import iree_marshal as im
from benchmarks.calls import executor
from benchmarks.programs import FUNCTION, load
from iree_marshal import __version__
from iree_marshal.backend import cache, toolchain
from iree_marshal.bench.cases import Fixture, detach
from iree_marshal.bench.harness import UNIT, Case, Derived, Settings, measure
from iree_marshal.bench.report import spread, summarize, table

__all__ = ["busy_cases", "busy_derived", "main", "verdicts"]

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "two_gpus.json"
CALLS = ("import", "export", "call.2x2")
MOST_BESIDE_BUSY = 1.1
LEAST_THROUGHPUT = 1.9
# Long enough on one GPU that threads and the GIL do not count: 20 products of 1024x1024 matrices.
SIDE, PRODUCTS = 1024, 20


class Beside(Protocol):
    """The other GPU."""

    def look(self) -> object:
        """Ask whether it is idle, and leave it so."""

    def keep_busy(self) -> object:
        """Ask the same, and give it work where it is."""


class Neighbour:
    """The other GPU, kept busy without a thread that would want the GIL: by kernels that only wait, queued ahead.

    Parameters
    ----------
    device : torch.device
        Which one.
    cycles : int
        How long one of them waits; about 100 ms.
    """

    def __init__(self, device: torch.device, cycles: int = 200_000_000) -> None:
        self._device = device
        self._cycles = cycles
        self._done = torch.cuda.Event()
        self.given = 0

    def look(self) -> bool:
        return self._done.query()

    def keep_busy(self) -> None:
        if self._done.query():
            with torch.cuda.device(self._device):
                torch.cuda._sleep(self._cycles)
                self._done.record()
            self.given += 1


def beside(touch: Callable[[], object], call: Callable[[], object]) -> Callable[[], object]:
    """Call with the same look at the other GPU in both cases, so that only what it does differs."""

    def both() -> object:
        touch()
        return call()

    return both


def busy_cases(fixture: Fixture, other: Beside) -> Iterator[Case]:
    """Time the crossing and a small call with the other GPU idle, and busy."""
    tensors = fixture.tensors()
    yield Case(UNIT, "torch floor: `[t.detach() for t in ts]`, the unit", lambda: detach(tensors))
    variants = im.to_variant_list(tensors)
    small = executor(load(fixture, 2, 2, storage=False), fixture)
    pair = fixture.tensors(2)
    calls: dict[str, tuple[str, Callable[[], object], int, str]] = {
        "import": ("`to_variant_list(ts)`", lambda: im.to_variant_list(tensors), len(tensors), "tensor"),
        "export": ("`from_variant_list`", lambda: im.from_variant_list(variants), len(tensors), "tensor"),
        "call.2x2": ("`Executor`, 2 in, 2 out", lambda: small(*pair), 1, "call"),
    }
    for name in CALLS:
        title, call, count, per = calls[name]
        yield Case(f"{name}.idle", f"{title}, the other GPU idle", beside(other.look, call), count, per)
        yield Case(f"{name}.busy", f"{title}, the other GPU busy", beside(other.keep_busy, call), count, per)


def busy_derived() -> Iterator[Derived]:
    """Yield how much longer each takes beside a busy GPU."""
    for name in CALLS:
        yield Derived(
            f"busy.{name}",
            f"`{name}` beside a busy GPU",
            lambda one, name=name: one[f"{name}.busy"] / one[f"{name}.idle"],
            "x",
        )


def products() -> str:
    """Write a program that keeps one GPU busy for a while."""
    kind = f"tensor<{SIDE}x{SIDE}xf32>"
    return f"""
func.func @{FUNCTION}(%a: {kind}) -> {kind} {{
  %zero = arith.constant 0.0 : f32
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = arith.constant {PRODUCTS} : index
  %r = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a) -> {kind} {{
    %e = tensor.empty() : {kind}
    %f = linalg.fill ins(%zero : f32) outs(%e : {kind}) -> {kind}
    %m = linalg.matmul ins(%x, %a : {kind}, {kind}) outs(%f : {kind}) -> {kind}
    scf.yield %m : {kind}
  }}
  return %r : {kind}
}}
"""


def worker(device: torch.device) -> Callable[[int], None]:
    """Load that program on one GPU, check a call, and return what makes some."""
    text = products()
    flags = [flag for flag in toolchain.flags_for(device) if not flag.startswith("--iree-input-type")]
    key = cache.key(text, [*flags, toolchain.compiler_version(), __version__, toolchain.host_cpu()])
    module, _ = cache.Cache().get(key, lambda: toolchain.compile_program(text, flags, "products"), lambda module: None)
    exe = im.Executor.load(module, FUNCTION, device=device)
    x = torch.eye(SIDE, device=device) * 2
    if not torch.equal(exe(x).diagonal(), torch.full((SIDE,), 2.0 ** (PRODUCTS + 1), device=device)):
        raise RuntimeError(f"the products are wrong on {device}")

    def work(calls: int) -> None:
        for _ in range(calls):
            exe(x)

    return work


def seconds(workers: Sequence[Callable[[int], None]], calls: int) -> float:
    """How long all workers take for so many calls each, every one in a thread of its own."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(workers) + 1)

    def run(work: Callable[[int], None]) -> None:
        try:
            barrier.wait()
            work(calls)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in workers]
    for thread in threads:
        thread.start()
    barrier.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - begun
    if failures:
        raise failures[0]
    return taken


def throughput(workers: Sequence[Callable[[int], None]], rounds: int, calls: int) -> dict[str, Any]:
    """Compare all workers at once with the first alone, round by round."""
    gained = []
    for _ in range(rounds):
        alone = seconds(workers[:1], calls)
        gained.append(len(workers) * alone / seconds(workers, calls))
    value, iqr = spread(gained)
    title = f"calls per second of {len(workers)} GPUs over one, one process, a thread each"
    return {"title": title, "unit": "x", "value": value, "iqr": iqr}


def images_per_second(processes: int, model: str, images: int) -> float:
    """Run the data-parallel example of the documentation; every process has as many images."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = [str(ROOT / "docs" / "distributed_inference.py"), "--model", model, "--images", str(images * processes)]
    done = subprocess.run([*command, *program], capture_output=True, text=True, check=False, cwd=ROOT)
    found = re.search(rf"{processes} processes on \w+: ([\d.]+) images/s", done.stdout)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{' '.join(program)} failed:\n{done.stderr[-2000:]}")
    return float(found[1])


def data_parallel(model: str, rounds: int, images: int) -> dict[str, Any]:
    """Compare two processes with one."""
    gained = [images_per_second(2, model, images) / images_per_second(1, model, images) for _ in range(rounds)]
    value, iqr = spread(gained)
    return {"title": f"images per second of two processes over one, {model}", "unit": "x", "value": value, "iqr": iqr}


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """Return what misses its bar."""
    missed = []
    for name, row in report["derived"].items():
        if name.startswith("busy.") and row["value"] > MOST_BESIDE_BUSY:
            missed.append(f"{name}: {row['value']:.2f} is more than {MOST_BESIDE_BUSY}")
        if name.startswith("two.") and row["value"] < LEAST_THROUGHPUT:
            missed.append(f"{name}: {row['value']:.2f} is less than {LEAST_THROUGHPUT}")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep.

    Parameters
    ----------
    argv : sequence of str, optional
        Options; those of the process by default.

    Returns
    -------
    int
        0 where all bars are met.
    """
    options = argparse.ArgumentParser(prog="python -m benchmarks.two_gpus", description=str(__doc__).splitlines()[0])
    options.add_argument("--quick", action="store_true", help="a smoke run: few short rounds, a tiny model")
    options.add_argument("--into", type=Path, default=RESULT, metavar="FILE", help="where the report is kept")
    chosen = options.parse_args(argv)
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"two GPUs are needed: torch.cuda.device_count() is {torch.cuda.device_count()}")
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    settings = Settings(rounds=3, warmup=1, sample_ms=2.0, quick=True) if chosen.quick else Settings(rounds=21)
    fixture, other = Fixture(first, quick=chosen.quick), Neighbour(second)

    def synchronize() -> None:
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)

    recording = measure(busy_cases(fixture, other), busy_derived(), settings=settings, synchronize=synchronize)
    if other.given < settings.rounds * len(CALLS):
        raise RuntimeError("the other GPU was not kept busy")
    workers = [worker(first), worker(second)]
    recording.figures["two.threads"] = throughput(workers, 3 if chosen.quick else 9, 10 if chosen.quick else 50)
    model, images = ("tiny", 64) if chosen.quick else ("resnet50", 512)
    recording.figures["two.processes"] = data_parallel(model, 1 if chosen.quick else 3, images)
    report = summarize([recording], settings, first)
    report["machine"]["accelerators"] = torch.cuda.device_count()
    sys.stdout.write(table(report))
    chosen.into.parent.mkdir(parents=True, exist_ok=True)
    chosen.into.write_text(json.dumps(report, indent=1) + "\n")
    missed = verdicts(report)
    sys.stdout.writelines(f"missed: {text}\n" for text in missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
