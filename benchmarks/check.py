#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hold a report against the numbers that this package promises: the bar, and the goal behind it.

    python benchmarks/check.py benchmarks/results/cpu.json

Exits non-zero where a bar is missed or a number is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a difference of differences resolves; a goal of nothing is reached below it.
NOISE = 0.005


@dataclass(frozen=True)
class Bar:
    """One promise.

    Attributes
    ----------
    what : str
        For the table.
    key : str
        Where the report has it: part, name and field, separated by ``:``. ``{faster}`` in a name is the way of getting
        results, storage arguments or IREE's own allocation, whose bare invocation is faster.
    first, goal : float or None
        At most this (at least, where `least`).
    scale : float
        The report's number is multiplied by it.
    unit : str
        Of `first` and `goal`.
    devices : tuple of str
        Where it holds.
    least : bool
        Whether larger is better.
    """

    what: str
    key: str
    first: float
    goal: float | None = None
    unit: str = "x detach"
    scale: float = 1.0
    devices: tuple[str, ...] = ("cpu", "cuda")
    least: bool = False

    def met(self, value: float, bound: float) -> bool:
        """Tell whether a number keeps a bound."""
        return value >= bound if self.least else value <= bound


_CUDA = ("cuda",)
_FLAT = [
    Bar(f"{way}: cost per tensor, {size} over 100", f"derived:flat.{way}.{size}:value", 1.5, unit="x")
    for way in ("import", "export")
    for size in (400, 1000, 10_000)
]
_WHOLE = [
    Bar(
        f"400 in, 450 out over the bare invocation, {what}",
        f"derived:over.call.400x450.{way}.percent:value",
        first,
        goal,
        "%",
        devices=_CUDA,
    )
    for what, way, first, goal in (
        ("new tensors", "{faster}.new", 13, 10),
        ("known arguments", "{faster}.known", 11, 9),
        ("bound arguments, reused outputs", "storage.bound_reuse", 3, 1),
    )
]
BARS = [
    Bar("`to_variant_list`, new tensors", "cases:import.ours:ratio", 0.33, 0.20),
    Bar("`from_variant_list`, results of a program", "cases:export.ours:ratio", 1.0, 0.75, devices=("cpu",)),
    Bar("`from_variant_list`, results of a program", "cases:export.ours:ratio", 1.05, 0.75, devices=_CUDA),
    *_FLAT,
    Bar("`Executor`: argument seen before", "derived:executor.argument.known:value", 0.18, 0.06),
    Bar("`Executor`: bound argument", "derived:executor.argument.bound:value", 0.01, NOISE),
    Bar("`Executor`: result as a view of a slab", "derived:executor.result.storage.views:value", 1.2, 0.9),
    Bar("`Executor`: result with `reuse_outputs`", "derived:executor.result.storage.reuse:value", 0.02, NOISE),
    Bar("memory per imported tensor", "derived:memory.live:value", 400, unit="bytes"),
    Bar("memory left afterwards, per tensor", "derived:memory.left:value", 1, unit="bytes"),
    Bar("import: stock `to_dlpack` over ours", "derived:speedup.import:value", 8, unit="x", devices=_CUDA, least=True),
    Bar("ordering, per call", "derived:order.us:value", 8, unit="us", devices=_CUDA),
    Bar(
        "2 in, 2 out with storage arguments, new tensors",
        "cases:call.2x2.storage.new:median",
        60,
        unit="us",
        scale=1e-3,
        devices=_CUDA,
    ),
    *_WHOLE,
    Bar(
        "`torch.compile`d two-layer MLP over the bare invocation",
        "derived:over.compiled.mlp.ours.us:value",
        60,
        unit="us",
        devices=_CUDA,
    ),
]


def find(report: Mapping[str, Any], bar: Bar) -> float | None:
    """Return the report's number for a bar, or None where it has none."""
    part, name, field = bar.key.split(":")
    if "{faster}" in name:
        bare = {kind: report["cases"].get(f"call.400x450.{kind}.bare") for kind in ("own", "storage")}
        known = {kind: row["median"] for kind, row in bare.items() if row is not None}
        if len(known) < 2:
            return None
        name = name.format(faster=min(known, key=lambda kind: known[kind]))
    row = report[part].get(name)
    return None if row is None else float(row[field]) * bar.scale


def verdict(bar: Bar, value: float | None) -> str:
    """Return ``goal``, ``pass``, ``FAIL`` or ``missing``."""
    if value is None:
        return "missing"
    if not bar.met(value, bar.first):
        return "FAIL"
    return "goal" if bar.goal is not None and bar.met(value, bar.goal) else "pass"


def main(argv: Sequence[str] | None = None) -> int:
    """Check one file; 1 where a bar is missed or a number is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    arguments = parser.parse_args(argv)
    try:
        report = json.loads(arguments.report.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{arguments.report}: {error}") from error
    device = report["device"]
    lines = [
        f"{device}, {report['date']}, path {report['path']}, unit {report['unit']['ns']:.0f} ns",
        "",
        "| number | measured | bar | goal | unit | |",
        "|---|---:|---:|---:|---|---|",
    ]
    missed = 0
    for bar in BARS:
        if device not in bar.devices:
            continue
        value = find(report, bar)
        word = verdict(bar, value)
        missed += word in ("FAIL", "missing")
        measured = "-" if value is None else f"{value:.3f}"
        goal = "" if bar.goal is None else f"{bar.goal:g}"
        sign = "at least " if bar.least else ""
        lines.append(f"| {bar.what} | {measured} | {sign}{bar.first:g} | {goal} | {bar.unit} | {word} |")
    lines.append(f"\n{missed} missed" if missed else "\nevery bar is met")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
