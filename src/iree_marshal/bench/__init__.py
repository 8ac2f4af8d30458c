# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the crossing costs, measured beside the stock bindings and torch's own floor.

`python -m iree_marshal bench` needs neither a compiler nor an optional package. The
runner in ``benchmarks/`` of the repository adds invocations, the `Executor`, peers
and plots on top of the same harness.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from iree_marshal.bench.cases import Fixture, core_cases, core_derived
from iree_marshal.bench.harness import UNIT, Case, Settings, measure
from iree_marshal.bench.memory import memory_per_import
from iree_marshal.bench.report import summarize, table

__all__ = ["main", "parser", "select", "settings_of"]


def select(cases: Iterable[Case], patterns: Sequence[str]) -> Iterator[Case]:
    """Keep the unit, and what matches one of the shell patterns; everything where there are none."""
    for case in cases:
        if not patterns or case.name == UNIT or any(fnmatch.fnmatch(case.name, one) for one in patterns):
            yield case


def parser() -> argparse.ArgumentParser:
    """Make the options that every runner has."""
    options = argparse.ArgumentParser(prog="python -m iree_marshal bench", description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu", help="where the tensors are: cpu (default), cuda, cuda:1, ...")
    options.add_argument("--quick", action="store_true", help="a smoke run: three short rounds, no long lists")
    options.add_argument("--rounds", type=int, help="rounds to keep (default 41)")
    options.add_argument("--sample-ms", type=float, help="length of one sample (default 12 ms)")
    options.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cases to run; repeatable")
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the report here")
    return options


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Read the settings out of parsed options."""
    base = Settings(rounds=3, warmup=1, sample_ms=1.0, quick=True) if arguments.quick else Settings()
    rounds = base.rounds if arguments.rounds is None else arguments.rounds
    sample_ms = base.sample_ms if arguments.sample_ms is None else arguments.sample_ms
    if rounds < 1 or sample_ms <= 0:
        raise SystemExit("--rounds must be at least 1 and --sample-ms greater than 0")
    return Settings(rounds, base.warmup, sample_ms, base.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the core cases, print the table and write the report.

    Parameters
    ----------
    argv : sequence of str, optional
        Options; those of the process by default.

    Returns
    -------
    int
        The exit status.
    """
    arguments = parser().parse_args(argv)
    settings = settings_of(arguments)
    fixture = Fixture(arguments.device, quick=settings.quick)
    recording = measure(
        select(core_cases(fixture), arguments.only),
        core_derived(fixture),
        settings=settings,
        synchronize=fixture.synchronize,
    )
    if not arguments.only:
        recording.figures |= memory_per_import(fixture, 400 if settings.quick else 10_000)
    report = summarize([recording], settings, fixture.torch)
    sys.stdout.write(table(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0
