# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run every case, in one process or several, and keep report, table and plots in ``benchmarks/results/``.

python -m benchmarks [--device cuda] [--processes 3] [--quick] [--only 'call.*']
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from iree_marshal.backend.toolchain import MissingCompilerError
from iree_marshal.bench import parser, select, settings_of
from iree_marshal.bench.cases import Fixture, core_cases, core_derived
from iree_marshal.bench.harness import Case, Derived, Recording, Settings, measure
from iree_marshal.bench.memory import memory_per_import
from iree_marshal.bench.report import summarize, table

RESULTS = Path(__file__).parent / "results"


def groups(fixture: Fixture, skipped: dict[str, str]) -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    """Yield every group of cases with the first words of its cases' names."""
    from benchmarks.calls import call_cases
    from benchmarks.compiled import compiled_cases
    from benchmarks.cuda import order_cases
    from benchmarks.peers import peer_cases

    yield "floor import export scaling", lambda: core_cases(fixture)
    yield "arguments results call export adopt", lambda: call_cases(fixture)
    if fixture.cuda:
        yield "order", lambda: order_cases(fixture)
    yield "peer", lambda: peer_cases(fixture, skipped)
    yield "compiled", lambda: compiled_cases(fixture)


def cases(fixture: Fixture, patterns: Sequence[str], skipped: dict[str, str]) -> Iterator[Case]:
    """Yield the cases that match; groups that cannot match, or that lack a compiler, are not built."""
    wanted = {pattern.split(".")[0] for pattern in patterns}
    for names, build in groups(fixture, skipped):
        words = names.split()
        if patterns and words[0] != "floor" and not any("*" in one or "?" in one or one in words for one in wanted):
            continue
        try:
            yield from select(build(), patterns)
        except MissingCompilerError as missing:
            skipped[words[0]] = str(missing)


def derived(fixture: Fixture) -> Iterator[Derived]:
    """Yield the figures of all groups."""
    from benchmarks.calls import call_derived
    from benchmarks.cuda import order_derived

    yield from core_derived(fixture)
    yield from call_derived(fixture)
    yield from order_derived()


def record(arguments: argparse.Namespace, settings: Settings) -> Recording:
    """Measure in this process."""
    fixture = Fixture(arguments.device, quick=settings.quick)
    skipped: dict[str, str] = {}
    recording = measure(
        cases(fixture, arguments.only, skipped), derived(fixture), settings=settings, synchronize=fixture.synchronize
    )
    recording.skipped |= skipped
    if not arguments.only:
        recording.figures |= memory_per_import(fixture, 400 if settings.quick else 10_000)
    return recording


def record_apart(options: Sequence[str]) -> Recording:
    """Measure in a child process: addresses and hashes are drawn anew there, and with them what caches hold."""
    with tempfile.TemporaryDirectory(prefix="iree_marshal-") as folder:
        raw = Path(folder, "rounds.json")
        subprocess.run([sys.executable, "-m", "benchmarks", *options, "--raw", str(raw)], check=True)
        return Recording(**json.loads(raw.read_text()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep.

    Parameters
    ----------
    argv : sequence of str, optional
        Options; those of the process by default.

    Returns
    -------
    int
        The exit status.
    """
    options = list(sys.argv[1:] if argv is None else argv)
    offered = parser()
    offered.prog = "python -m benchmarks"
    offered.add_argument("--processes", type=int, default=1, help="measure in this many processes (default 1)")
    offered.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER", help="where results are kept")
    offered.add_argument("--no-plots", action="store_true", help="do not draw, also where matplotlib is installed")
    offered.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    arguments = offered.parse_args(options)
    settings = settings_of(arguments)
    if arguments.processes > 1 and arguments.raw is None:
        recordings = [record_apart(options) for _ in range(arguments.processes)]
    else:
        recordings = [record(arguments, settings)]
    if arguments.raw is not None:
        arguments.raw.write_text(json.dumps(asdict(recordings[0])))
        return 0
    report = summarize(recordings, settings, Fixture(arguments.device).torch)
    text = table(report)
    sys.stdout.write(text)
    keep(report, text, arguments)
    return 0


def keep(report: dict[str, object], text: str, arguments: argparse.Namespace) -> None:
    """Write the report as JSON, Markdown and plots, under a name that says the device and the scope."""
    from benchmarks import plots

    folder: Path = arguments.into
    folder.mkdir(parents=True, exist_ok=True)
    partial = "-partial" if arguments.only else ""
    name = arguments.device.split(":")[0] + ("-quick" if arguments.quick else partial)
    whole = json.dumps(report, indent=1) + "\n"
    (folder / f"{name}.json").write_text(whole)
    (folder / f"{name}.md").write_text(text)
    if arguments.json is not None:
        arguments.json.write_text(whole)
    if not arguments.no_plots:
        for path in plots.draw(report, folder, name):
            sys.stdout.write(f"drawn: {path.name}\n")


if __name__ == "__main__":
    sys.exit(main())
