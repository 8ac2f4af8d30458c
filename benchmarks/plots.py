# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plots of a report, where matplotlib is installed.

`make bench` draws what it measured. A report of another machine is drawn with

    python benchmarks/plots.py benchmarks/results/cuda.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw", "main"]

OURS, STOCK, TORCH, OTHER = "#0b6e4f", "#c8553d", "#6c757d", "#a7b0b8"


def draw(report: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Draw what the report has the cases for.

    Parameters
    ----------
    report : mapping
        As `iree_marshal.bench.report.summarize` makes it.
    folder : Path
        Where the files go.
    name : str
        What their names begin with.

    Returns
    -------
    list of Path
        The files; none without matplotlib.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        return []
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    # Text stays text and ids stay the same, so that a plot of the same numbers is the same file.
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "iree_marshal",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.use": True,
    }
    paths = []
    with matplotlib.rc_context(style):
        for topic, plot in (("scaling", scaling), ("stock", stock), ("share", share)):
            figure = plot(pyplot, report)
            if figure is None:
                continue
            machine = report["machine"]
            hardware = machine.get("accelerator") or machine["processor"]
            figure.text(0.99, 0.005, f"{hardware}, {report['date']}", ha="right", va="bottom", fontsize=7, color=TORCH)
            path = folder / f"{name}-{topic}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            paths.append(path)
    return paths


def scaling(pyplot: Any, report: Mapping[str, Any]) -> Any:
    """Plot the cost per tensor over the length of the list."""
    lines = (
        ("export.stock", "out: stock, torch.from_dlpack", STOCK, "-"),
        ("import.stock", "in: stock, to_dlpack", STOCK, "--"),
        ("export", "out: from_variant_list", OURS, "-"),
        ("detach", "t.detach()", TORCH, ":"),
        ("import", "in: to_variant_list", OURS, "--"),
    )
    figure, axes = pyplot.subplots(figsize=(7, 4))
    drawn = False
    for way, label, color, line in lines:
        prefix = f"scaling.{way}."
        points = sorted(
            (row["count"], row["median"])
            for name, row in report["cases"].items()
            if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
        )
        if points:
            drawn = True
            axes.plot(*zip(*points, strict=True), color=color, linestyle=line, marker="o", markersize=4, label=label)
    if not drawn:
        pyplot.close(figure)
        return None
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tensors in the list",
        ylabel="ns per tensor",
        title=f"Cost per tensor over the length of the list ({report['device']})",
    )
    axes.grid(alpha=0.25, which="major")
    axes.legend(frameon=False)
    return figure


def stock(pyplot: Any, report: Mapping[str, Any]) -> Any:
    """Plot ways in and out beside each other, in units."""
    rows = (
        ("in: to_variant_list", "import.ours", OURS),
        ("in: stock, to_dlpack", "import.stock.to_dlpack", STOCK),
        ("in: stock, __dlpack__", "import.stock.dunder", STOCK),
        ("in: stock, through numpy (copies)", "import.stock.copy", OTHER),
        ("in: tvm-ffi (arguments only)", "peer.tvm_ffi.arguments", OTHER),
        ("in: onnxruntime bind_input", "peer.onnxruntime.bind_input", OTHER),
        ("out: from_variant_list", "export.ours", OURS),
        ("out: stock, torch.from_dlpack", "export.stock", STOCK),
        ("out: stock, to_host (copies)", "export.stock.copy", OTHER),
        ("out: onnxruntime, raw", "peer.onnxruntime.outputs", OTHER),
        ("out: torch.as_tensor, array interface", "adopt.as_tensor", OTHER),
    )
    known = [(label, report["cases"][name]["ratio"], color) for label, name, color in rows if name in report["cases"]]
    if not known:
        return None
    labels, values, colors = zip(*known, strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.36 * len(known)))
    bars = axes.barh(labels, values, color=colors)
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in values], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(
        xscale="log",
        xlabel="cost per tensor, in t.detach() (log scale)",
        title=f"One tensor across the border ({report['device']})",
    )
    return figure


def share(pyplot: Any, report: Mapping[str, Any]) -> Any:
    """Plot what of a whole call is the invocation and what is the crossing."""
    where, cases = "call.400x450", report["cases"]
    rows = (
        ("stock DLPack", "own.stock", STOCK),
        ("to_variant_list, from_variant_list", "own.by_hand", OURS),
        ("Executor, new tensors", "own.new", OURS),
        ("Executor, known tensors", "own.known", OURS),
        ("Executor, bound, reused outputs", "storage.bound_reuse", OURS),
    )
    known = []
    for label, way, color in rows:
        row, floor = cases.get(f"{where}.{way}"), cases.get(f"{where}.{way.split('.')[0]}.bare")
        over = report["derived"].get(f"over.{where}.{way}.us")
        if row is not None and floor is not None and over is not None:
            known.append((label, floor["median"] / 1000, max(over["value"], 0.0), color))
    if not known:
        return None
    labels, floors, overs, colors = zip(*known, strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 0.9 + 0.42 * len(known)))
    axes.barh(labels, floors, color="#d9dee2", label="bare invocation")
    bars = axes.barh(labels, overs, left=floors, color=colors)
    shares = [f"{over / (floor + over) * 100:.1f} %" for floor, over in zip(floors, overs, strict=True)]
    axes.bar_label(bars, labels=shares, padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(
        xlabel="us per call; grey: the bare invocation, colour and label: the crossing's share",
        title=f"400 tensors in, 450 out ({report['device']})",
    )
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Draw each named report beside its file; 1 where that draws nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="*")
    for path in parser.parse_args(argv).reports:
        drawn = draw(json.loads(path.read_text()), path.parent, path.stem)
        if not drawn:
            sys.stderr.write(f"{path}: nothing drawn; plots need matplotlib\n")
            return 1
        sys.stdout.writelines(f"drawn: {plot.name}\n" for plot in drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
