# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which path the crossing takes in this process, decided at its first use."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from iree_marshal import devices, portable
from iree_marshal.errors import UnsupportedRuntimeError
from iree_marshal.selfcheck import NEWEST, OLDEST, Report, prove

__all__ = ["PathStatus", "active", "force", "status"]

_log = logging.getLogger("iree_marshal")
_CHOICES = ("auto", "fast", "portable")
_lock = threading.RLock()
_active: ModuleType | None = None
_status: PathStatus | None = None


@dataclass(frozen=True)
class PathStatus:
    """Which path is active, and why.

    Attributes
    ----------
    path : str
        ``fast`` or ``portable``.
    why : str
        In one line.
    report : Report or None
        Of the self-check; `None` where it was not run.
    """

    path: str
    why: str
    report: Report | None


def active() -> ModuleType:
    """The module that does the crossing: `iree_marshal.native` or `iree_marshal.portable`.

    Raises
    ------
    UnsupportedRuntimeError
        ``IREE_MARSHAL_PATH=fast`` on a runtime that did not pass the self-check.
    ValueError
        ``IREE_MARSHAL_PATH`` has another value than ``auto``, ``fast`` or ``portable``.
    """
    if _active is not None:
        return _active
    with _lock:
        if _active is None:
            _decide()
        assert _active is not None
        return _active


def status() -> PathStatus:
    """What was decided; decides first if nothing was used yet."""
    active()
    assert _status is not None
    return _status


@contextmanager
def force(path: str) -> Iterator[ModuleType]:
    """Take another path than the decided one for a while (``fast`` or ``portable``); for tests. Not thread-safe."""
    global _active
    if path not in ("fast", "portable"):
        raise ValueError(f"path: expected 'fast' or 'portable', got {path!r}")
    before = _active
    if path == "fast":
        report = prove()
        if not report.ok:
            raise UnsupportedRuntimeError(_refusal(report))
    _active = portable if path == "portable" else _open_native()
    try:
        yield _active
    finally:
        _active = before


def _decide() -> None:
    global _active, _status
    choice = os.environ.get("IREE_MARSHAL_PATH", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"IREE_MARSHAL_PATH={choice}: expected one of {', '.join(_CHOICES)}")
    devices.vm_instance()
    if choice == "portable":
        _status = PathStatus("portable", "IREE_MARSHAL_PATH=portable", None)
        _active = portable
        return
    report = prove()
    if report.ok:
        native = _open_native()
        release = f"iree-base-runtime {report.version}"
        if report.known:
            why = f"every proof passed on {release}"
        else:
            why = f"every proof passed on {release}, which is not among the releases known to this package"
            _log.info("%s; the native path is used", why)
        _status = PathStatus("fast", why, report)
        _active = native
        return
    if choice == "fast":
        raise UnsupportedRuntimeError(_refusal(report))
    warnings.warn(
        f"{_refusal(report)}; the slower portable path is used. Install a supported iree-base-runtime, or set "
        "IREE_MARSHAL_PATH=portable to accept this silently",
        RuntimeWarning,
        stacklevel=4,
    )
    _status = PathStatus("portable", report.reason, report)
    _active = portable


def _open_native() -> ModuleType:
    from iree_marshal import native

    native.arm()
    return native


def _refusal(report: Report) -> str:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return (
        f"iree_marshal: the native path is not available: found iree-base-runtime {report.version} "
        f"({report.reason}); supported: {oldest} to {newest} on Linux x86-64, and newer ones that pass the self-check"
    )
