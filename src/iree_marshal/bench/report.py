# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From recorded rounds to a report: medians, spreads, the machine they hold for, and a table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from iree_marshal import __version__, paths
from iree_marshal.bench.harness import UNIT, Recording, Settings

__all__ = ["spread", "summarize", "table"]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return middle, third - first


def summarize(recordings: Sequence[Recording], settings: Settings, device: torch.device) -> dict[str, Any]:
    """Reduce the rounds of one or several processes to medians and spreads.

    Returns
    -------
    dict
        What is written as JSON: ``cases`` holds, by name, ``median`` and ``iqr`` (host ns per
        tensor or call), ``drained`` (the same until the device was idle), ``ratio`` and
        ``ratio_iqr`` (over the unit just before it), ``unit_ns``, ``thread`` and
        ``thread_ratio`` (processor time of the calling thread, which a busy machine changes
        less); ``derived`` holds figures.
    """
    first = recordings[0]
    unit = [ns / first.cases[UNIT]["count"] for one in recordings for ns in one.host[UNIT]]
    unit_thread = [ns / first.cases[UNIT]["count"] for one in recordings for ns in one.thread[UNIT]]
    report: dict[str, Any] = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.type,
        "machine": machine(device),
        "versions": versions(),
        "path": path(),
        "settings": asdict(settings) | {"processes": len(recordings)},
        "unit": {"name": UNIT, "ns": statistics.median(unit)},
        "cases": {},
        "derived": {},
        "skipped": {name: why for one in recordings for name, why in one.skipped.items()},
    }
    for name, about in first.cases.items():
        if not all(name in one.host for one in recordings):
            continue  # it failed in one of the processes, which `skipped` says
        count = about["count"]
        per_one = [ns / count for one in recordings for ns in one.host[name]]
        median, iqr = spread(per_one)
        floors = [ns / first.cases[UNIT]["count"] for one in recordings for ns in one.unit[name]]
        ratio, ratio_iqr = spread([ns / floor for ns, floor in zip(per_one, floors, strict=True)])
        drained = statistics.median([ns / count for one in recordings for ns in one.drained[name]])
        thread = [ns / count for one in recordings for ns in one.thread[name]]
        report["cases"][name] = about | {
            "median": median,
            "iqr": iqr,
            "drained": drained,
            "ratio": ratio,
            "ratio_iqr": ratio_iqr,
            "unit_ns": report["unit"]["ns"],
            "thread": statistics.median(thread),
            "thread_ratio": statistics.median([ns / floor for ns, floor in zip(thread, unit_thread, strict=True)]),
        }
    for name, about in first.derived.items():
        if not all(name in one.derived for one in recordings):
            continue
        value, iqr = spread([value for one in recordings for value in one.derived[name]["rounds"]])
        report["derived"][name] = {"title": about["title"], "unit": about["unit"], "value": value, "iqr": iqr}
    report["derived"] |= {name: row for one in recordings for name, row in one.figures.items()}
    return report


def path() -> str:
    """Name the active path, and on the native one how tensors are read."""
    name = paths.status().path
    if name != "fast":
        return name
    from iree_marshal import _tensors

    return ", ".join([name, *(f"{what}: {how}" for what, how in _tensors.describe().items())])


def machine(device: torch.device) -> dict[str, Any]:
    """Name the processor, and the accelerator where `device` is one."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    about: dict[str, Any] = {"processor": model, "cores": os.cpu_count(), "system": platform.system()}
    if device.type != "cpu":
        about["accelerator"] = torch.cuda.get_device_name(device)
    return about


def versions() -> dict[str, str]:
    """Find the versions of everything that takes part, where installed."""
    names = ["iree-base-runtime", "iree-base-compiler", "numpy", "apache-tvm-ffi", "onnxruntime", "iree-turbine"]
    found = {"python": platform.python_version(), "torch": torch.__version__, "iree-marshal": __version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown tables."""
    about, settings, derived = report["machine"], report["settings"], report["derived"]
    hardware = ", ".join([about["processor"], f"{about['cores']} cores", *filter(None, [about.get("accelerator")])])
    lines = [
        f"{hardware}; {report['date']}; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + ".",
        f"Unit: one `t.detach()` = {report['unit']['ns']:.0f} ns. {settings['rounds']} rounds in each of "
        f"{settings['processes']} process(es), {settings['sample_ms']:g} ms per sample; median and distance of the "
        f"quartiles; active path: {report['path']}.",
        "",
        "| case | what | per | time | spread | x detach | spread | over the bare invocation | |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, row in report["cases"].items():
        mark = f"not like for like: {row['unlike']}" if row["unlike"] else ""
        over = ""
        if f"over.{name}.us" in derived:
            over = f"{derived[f'over.{name}.us']['value']:.1f} us, {derived[f'over.{name}.percent']['value']:.1f} %"
        ratio = f"{row['ratio']:.3f} | {row['ratio_iqr']:.3f}" if row["per"] == "tensor" else " | "
        lines.append(
            f"| `{name}` | {row['title']} | {row['per']} | {duration(row['median'])} | {duration(row['iqr'])} "
            f"| {ratio} | {over} | {mark} |"
        )
    figures = {name: row for name, row in derived.items() if not name.startswith("over.")}
    if figures:
        lines += ["", "| figure | what | value | spread | |", "|---|---|---:|---:|---|"]
        for name, row in figures.items():
            lines.append(f"| `{name}` | {row['title']} | {row['value']:.3f} | {row['iqr']:.3f} | {row['unit']} |")
    if report["skipped"]:
        lines += ["", "| left out | why |", "|---|---|"]
        lines += [f"| `{name}` | {why} |" for name, why in report["skipped"].items()]
    return "\n".join(lines) + "\n"


def duration(nanoseconds: float) -> str:
    """Write a time with the unit that suits it."""
    return f"{nanoseconds:.1f} ns" if nanoseconds < 10_000 else f"{nanoseconds / 1000:.1f} us"
