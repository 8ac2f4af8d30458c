# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes the numbers in README.md from benchmarks/results/: ``python docs/make_numbers.py``, as ``make bench`` does.

Every number comes from ``cpu.json`` or ``cuda.json`` there; without these files no table is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from iree_marshal.bench.report import duration

__all__ = ["BEGIN", "END", "PAGE", "RESULTS", "replace", "table"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
DEVICES = ("cuda", "cpu")

BEGIN = "<!-- numbers: begin; made by docs/make_numbers.py -->\n"
END = "<!-- numbers: end -->\n"

# What the row says, the case, and the stock case that does the same.
ROWS = (
    ("400 tensors in, each", "import.ours", "import.stock.to_dlpack"),
    ("450 results out, each", "export.ours", "export.stock"),
    ("call of 2 in, 2 out: known tensors", "call.2x2.own.known", "call.2x2.own.stock"),
    ("call of 400 in, 450 out: new tensors", "call.400x450.own.new", "call.400x450.own.stock"),
    ("the same: known tensors", "call.400x450.own.known", "call.400x450.own.stock"),
    ("the same: bound tensors, reused outputs", "call.400x450.storage.bound_reuse", ""),
    ("two-layer MLP through `torch.compile`", "compiled.mlp.ours", ""),
)
PLOTS = {
    "stock": "one tensor across the border, beside stock and other packages",
    "scaling": "cost per tensor over the length of the list",
    "share": "share of the call that is the crossing",
}


def _stock(report: Mapping[str, Any], name: str) -> str:
    if name in report["cases"]:
        return duration(report["cases"][name]["median"])
    return "fails" if name in report["skipped"] else ""


def _over(report: Mapping[str, Any], name: str) -> str:
    percent = report["derived"].get(f"over.{name}.percent")
    return "" if percent is None else f"{percent['value']:.1f} %"


def table(report: Mapping[str, Any]) -> str:
    """One device's table, with the machine, the date and the versions above it."""
    about = report["machine"]
    hardware = [*filter(None, [about.get("accelerator")]), f"{about['processor']}, {about['cores']} cores"]
    versions = {name: report["versions"].get(name, "") for name in ("torch", "iree-base-runtime", "python")}
    settings = report["settings"]
    lines = [
        f"**{'; '.join(hardware)}**, {report['date']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f". One `t.detach()`: {report['unit']['ns']:.0f} ns. Median of {settings['rounds']} rounds in each of "
        f"{settings['processes']} process(es); the spread is the distance of the quartiles.",
        "",
        "| | time | spread | x `t.detach()` | stock bindings | over the bare invocation |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, name, stock in ROWS:
        row = report["cases"].get(name)
        if row is not None:
            ratio = f"{row['ratio']:.2f}" if row["per"] == "tensor" else ""
            lines.append(
                f"| {title} | {duration(row['median'])} | {duration(row['iqr'])} | {ratio} | {_stock(report, stock)} "
                f"| {_over(report, name)} |"
            )
    return "\n".join(lines) + "\n"


def sections(results: Path) -> Iterator[str]:
    """The table and the plots of each device that was measured."""
    for device in DEVICES:
        path = results / f"{device}.json"
        if path.exists():
            yield table(json.loads(path.read_text()))
            plots = [
                f"![{title}, {device}](benchmarks/results/{device}-{kind}.svg)\n"
                for kind, title in PLOTS.items()
                if (results / f"{device}-{kind}.svg").exists()
            ]
            if plots:
                yield "".join(plots)


def replace(page: str, results: Path) -> str:
    """The page with the tables of `results` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks for its numbers")
    return before + BEGIN + "\n".join(sections(results)) + END + after


if __name__ == "__main__":
    PAGE.write_text(replace(PAGE.read_text(), RESULTS))
