# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`python -m iree_marshal doctor`: what was found, what was proven, and which path is active."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import iree_marshal
from iree_marshal import devices, paths, selfcheck

__all__ = ["examine", "main", "render"]

_WIDTH = 100


def _installed(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _versions() -> dict[str, str]:
    return {
        "iree_marshal": iree_marshal.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _installed("numpy"),
        "IREE runtime": selfcheck.runtime_version() or "unknown version",
        "IREE compiler": _installed("iree-base-compiler"),
        "supported": selfcheck.supported(),
    }


def _platform() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "interpreter": f"{platform.python_implementation()}, {'no GIL' if 't' in sys.abiflags else 'with a GIL'}",
    }


def _path() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Of the active path, and of every proof; the self-check is run for the report where it was not needed."""
    with warnings.catch_warnings():
        # The report itself says what the warning would.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            status = paths.status()
        except ValueError as error:
            status = paths.PathStatus("none", str(error), None)
    report = status.report or selfcheck.prove()
    found = {"active": status.path, "why": status.why, "self-check": f"{report.elapsed_ms:.1f} ms"}
    return found, [dataclasses.asdict(proof) for proof in report.proofs]


def _native_findings() -> dict[str, str]:
    """How tensors are read and what was proven on each GPU; only where the native path is open."""
    from iree_marshal import _cuda, _tensors

    return _tensors.describe() | {
        f"{device} {name}": text for device, findings in _cuda.describe().items() for name, text in findings.items()
    }


def _devices(fast: bool) -> dict[str, str]:
    """Every torch device that IREE has a device for, or why it has none."""
    found = {}
    wanted = [torch.device("cpu")]
    if torch.cuda.is_available():
        wanted += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in wanted:
        text = ""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            text = f" ({properties.name}, UUID {properties.uuid})"
        try:
            hal_device = devices.hal_device(device)
            if fast:
                from iree_marshal import _objects

                _objects.native_device(hal_device)
            found[str(device)] = f"{devices.hal_uri(device)}{text}"
        except Exception as error:  # whatever a driver may say: it belongs into the report
            found[str(device)] = f"no IREE device: {type(error).__name__}: {error}{text}"
    return found


def examine() -> dict[str, Any]:
    """Find out everything.

    Returns
    -------
    dict
        ``versions``, ``platform``, ``path``, ``devices`` and ``native`` map names to texts;
        ``proofs`` is a list of ``{"name", "ok", "detail"}``. Ready for `json.dumps`.
    """
    path, proofs = _path()
    fast = path["active"] == "fast"
    found = _devices(fast)
    return {
        "versions": _versions(),
        "platform": _platform(),
        "proofs": proofs,
        "path": path,
        "devices": found,
        "native": _native_findings() if fast else {},
    }


def render(found: dict[str, Any]) -> str:
    """The report as one table."""
    sections = {
        name: [(key, text) for key, text in found[name].items()]
        for name in ("versions", "platform", "path", "devices", "native")
    }
    sections["proofs"] = [
        (each["name"], ("ok      " if each["ok"] else "FAILED  ") + each["detail"]) for each in found["proofs"]
    ]
    width = 2 + max(len(key) for rows in sections.values() for key, _ in rows)
    lines = []
    for name in ("versions", "platform", "proofs", "path", "devices", "native"):
        if sections[name]:
            lines.append(name)
        for key, text in sections[name]:
            wrapped = textwrap.wrap(str(text), max(_WIDTH - width - 2, 20)) or [""]
            lines.append(f"  {key:<{width}}{wrapped[0]}")
            lines += [" " * (width + 2) + line for line in wrapped[1:]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Parameters
    ----------
    argv : sequence of str, optional
        Options; those of the process by default.

    Returns
    -------
    int
        0 on the native path, 1 otherwise.
    """
    options = argparse.ArgumentParser(prog="python -m iree_marshal doctor", description=str(__doc__).splitlines()[0])
    options.add_argument("--json", action="store_true", help="print the report as JSON")
    chosen = options.parse_args(argv)
    found = examine()
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if chosen.json else render(found))
    return 0 if found["path"]["active"] == "fast" else 1
