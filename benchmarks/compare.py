#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compare two reports: a table of what changed, and a non-zero exit where something of ours got slower.

    python benchmarks/compare.py before.json after.json --threshold 10

Rows are compared in units of `t.detach()`, which cancels how fast the machine is. Stock and peer rows are shown and
never fail. Rows that are not like for like are marked, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Delta:
    """One row of the comparison.

    Attributes
    ----------
    name : str
        The case.
    before, after : float or None
        In units; None where the report lacks the case.
    percent : float or None
        By how much it grew.
    mark : str
        Why the row is not like for like; empty where it is.
    slower : bool
        Whether a row of ours grew past the threshold.
    """

    name: str
    before: float | None
    after: float | None
    percent: float | None
    mark: str
    slower: bool


def load(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises
    ------
    SystemExit
        The file is no report of this schema.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != 1 or "cases" not in report:
        raise SystemExit(f"{path}: not a benchmark report of schema 1")
    return report


def surroundings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what differs around the two measurements."""
    differences = [
        f"{key}: {before[key]} / {after[key]}"
        for key in ("device", "path", "machine", "settings")
        if before[key] != after[key]
    ]
    for name in sorted(before["versions"].keys() | after["versions"].keys()):
        old, new = before["versions"].get(name, "none"), after["versions"].get(name, "none")
        if old != new:
            differences.append(f"{name}: {old} / {new}")
    return differences


def deltas(before: Mapping[str, Any], after: Mapping[str, Any], threshold: float) -> list[Delta]:
    """Compare two reports case by case.

    Parameters
    ----------
    before, after : mapping
        Reports.
    threshold : float
        Percent that a row of ours may grow by.

    Returns
    -------
    list of Delta
        In the order of the reports, cases that only one of them has included.
    """
    rows = []
    for name in dict.fromkeys([*before["cases"], *after["cases"]]):
        old, new = before["cases"].get(name), after["cases"].get(name)
        if old is None or new is None:
            rows.append(Delta(name, old and old["ratio"], new and new["ratio"], None, "only in one report", False))
            continue
        marks = [f"{key} {old[key]} / {new[key]}" for key in ("count", "per") if old[key] != new[key]]
        marks += [reason for reason in dict.fromkeys([old["unlike"], new["unlike"]]) if reason]
        percent = (new["ratio"] / old["ratio"] - 1) * 100
        gated = (
            not new["optional"] and name != after["unit"]["name"] and not name.startswith(("floor.", "scaling.detach"))
        )
        rows.append(Delta(name, old["ratio"], new["ratio"], percent, "; ".join(marks), gated and percent > threshold))
    return rows


def render(rows: Sequence[Delta], differences: Sequence[str]) -> str:
    """Write the comparison as a Markdown table."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [f"differs: {difference}" for difference in differences]
    lines += ["", "| case | before, x detach | after, x detach | change | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        notes = ["SLOWER"] if row.slower else []
        if row.mark:
            notes.append(f"not like for like: {row.mark}")
        change = "-" if row.percent is None else f"{row.percent:+.1f} %"
        before, after = number(row.before, ".3f"), number(row.after, ".3f")
        lines.append(f"| `{row.name}` | {before} | {after} | {change} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two files; 1 where a row of ours grew past the threshold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threshold", type=float, default=10.0, help="percent a row may grow by (default 10)")
    arguments = parser.parse_args(argv)
    before, after = load(arguments.before), load(arguments.after)
    rows = deltas(before, after, arguments.threshold)
    sys.stdout.write(render(rows, surroundings(before, after)))
    slower = [row.name for row in rows if row.slower]
    if slower:
        sys.stdout.write(f"\nslower by more than {arguments.threshold:g} %: {', '.join(slower)}\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
