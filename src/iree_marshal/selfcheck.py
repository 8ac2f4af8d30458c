# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether the runtime in this process has the layouts that the native path is built on.

`prove` runs every proof on a table of layouts. Reading cannot
tell one function of a vtable from another. So for a release that was not tested, or a
table other than the built-in one, the proofs are first run in a child process, where a
crash or a wrong answer only means that the table is refused. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import iree.runtime as rt

if TYPE_CHECKING:
    from iree_marshal.subject import Subject

__all__ = [
    "TESTED",
    "Proof",
    "Report",
    "is_older",
    "prove",
    "prove_in_child",
    "read_memory",
    "runtime_version",
    "supported",
]

TESTED = ("3.4.0", "3.5.0", "3.6.0", "3.7.0", "3.8.0", "3.9.0", "3.10.0", "3.11.0", "3.12.0", "3.13.0")
"""Releases of iree-base-runtime whose layouts were verified one by one."""

_CHILD_SECONDS = 60
_log = logging.getLogger("iree_marshal")

# The child finds the same runtime, and leaves out the package's own __init__, which imports torch.
CHILD = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[2])
package = types.ModuleType("iree_marshal")
package.__path__ = [sys.argv[1]]
sys.modules["iree_marshal"] = package
from iree_marshal import trial
trial.main()
"""


@dataclasses.dataclass(frozen=True)
class Proof:
    """One step of the self-check."""

    name: str
    ok: bool
    detail: str
    """What the step shows or, where it failed, what was found instead."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a self-check; it ends with the first proof that failed."""

    proofs: tuple[Proof, ...]
    elapsed_ms: float
    """In this process, imports left out; what a child process took comes on top."""

    version: str
    """Of iree-base-runtime; empty where it is not installed as a package."""

    @property
    def ok(self) -> bool:
        """Whether every proof holds."""
        return bool(self.proofs) and all(proof.ok for proof in self.proofs)

    @property
    def failure(self) -> str:
        """What failed; empty when everything holds."""
        return next((f"{proof.name}: {proof.detail}" for proof in self.proofs if not proof.ok), "")


def read_memory(address: int, nbytes: int) -> bytes:
    """Read this process's own memory; a wild address raises `OSError` instead of crashing."""
    from iree_marshal import subject

    return subject.read_memory(address, nbytes)


def runtime_version() -> str:
    """The version of the iree-base-runtime that is loaded; empty where it cannot be told."""
    # Beside the package itself, which need not be the one that importlib.metadata would find.
    for found in Path(rt.__file__).parents[2].glob("iree_base_runtime-*.dist-info"):
        return found.name.removesuffix(".dist-info").partition("-")[2]
    return ""


def supported() -> str:
    """Which releases run natively, in words."""
    return f"iree-base-runtime {TESTED[0]} to {TESTED[-1]}, and newer ones that pass the self-check"


def is_older(version: str, than: str) -> bool:
    """Whether a version precedes a release, by major and minor number; False where it cannot be told."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    first = tuple(int(part) for part in than.split(".")[:2])
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < first


def prove(table: Mapping[str, int] | None = None, *, version: str | None = None) -> Report:
    """Prove a table of layouts in this process.

    Parameters
    ----------
    table : mapping of str to int, optional
        Offsets, constants and slots by name; by default those that the package was built with.
    version : str, optional
        The release that the runtime is taken for, by default the installed one. A release
        that is not in `TESTED` is tried in a child process first; one before the first of
        them is refused.

    Returns
    -------
    Report
        Never raises for a wrong table, and never crashes.
    """
    found = runtime_version() if version is None else version
    start = time.perf_counter()
    done: list[Proof] = []

    def report(*last: Proof) -> Report:
        return Report((*done, *last), (time.perf_counter() - start) * 1e3, found)

    if found and is_older(found, TESTED[0]):
        return report(Proof("version", False, f"iree-base-runtime {found}; supported: {supported()}"))
    try:
        from iree_marshal import _probe, subject
        from iree_marshal.proofs import READS
        from iree_marshal.proofs_by_call import CALLS
    except ImportError as error:
        return report(Proof("extension", False, f"cannot be loaded: {error}"))
    start = time.perf_counter()
    built_in = _probe.layout_table()
    used = built_in if table is None else table
    if used.keys() != built_in.keys():
        return report(Proof("table", False, f"wrong names: {sorted(used.keys() ^ built_in.keys())}"))
    tested = found in TESTED and used == built_in
    try:
        examined = subject.Subject(used)
    except Exception as error:
        return report(Proof("objects", False, f"{type(error).__name__}: {error}"))
    with examined:
        done += run(examined, READS)
        if not done[-1].ok:
            return report()
        if not tested:
            before = time.perf_counter()
            trial = prove_in_child([used])[0]
            start += time.perf_counter() - before
            if not trial.ok:
                return report(dataclasses.replace(trial, name=f"in a child process, {trial.name}"))
        done += run(examined, CALLS)
    if done[-1].ok and not tested:
        _log.info(
            "iree-base-runtime %s was not tested with this release of iree_marshal, but passes its self-check: "
            "the native path is used",
            found or "(unknown version)",
        )
    return report()


def run(subject: Subject, steps: Sequence[Callable[[Subject], None]]) -> list[Proof]:
    """Run steps up to the first that does not hold."""
    from iree_marshal.subject import Refused

    done = []
    for step in steps:
        name = step.__name__.removeprefix("prove_").replace("_", " ")
        try:
            step(subject)
        except Refused as refusal:
            done.append(Proof(name, False, str(refusal)))
            break
        except Exception as error:  # a wild read, or the runtime's own refusal
            done.append(Proof(name, False, f"{type(error).__name__}: {error}"))
            break
        done.append(Proof(name, True, (step.__doc__ or "").splitlines()[0]))
    return done


def prove_in_child(tables: Sequence[Mapping[str, int]]) -> list[Proof]:
    """Run every proof in a child process, each table in a fork of its own.

    Returns
    -------
    list of Proof
        Per table the first failure, or the last proof.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent), json.dumps(sys.path)],
            input=json.dumps([dict(table) for table in tables]),
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS + 2 * len(tables),
            check=False,
        )
        if child.returncode == 0:
            return [Proof(**found) for found in json.loads(child.stdout)]
        lines = child.stderr.strip().splitlines()
        failure = f"exit status {child.returncode}: {lines[-1] if lines else 'no output'}"
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        failure = f"{type(error).__name__}: {error}"
    return [Proof("trial", False, failure)] * len(tables)
