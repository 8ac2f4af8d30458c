# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which path crosses in this process, the native or the portable one, and why.

Decided at the first use, once. ``IREE_MARSHAL_PATH`` = ``fast``, ``portable`` or ``auto``
(the default) forces a choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from iree_marshal import portable, selfcheck
from iree_marshal.errors import UnsupportedRuntimeError

__all__ = ["CHOICES", "PathStatus", "active", "force", "status"]

CHOICES = ("fast", "portable", "auto")
_VARIABLE = "IREE_MARSHAL_PATH"

# Both are modules with `to_variant_list` and `from_variant_list`.
Path = Any


@dataclasses.dataclass(frozen=True)
class PathStatus:
    """What was decided, and on what grounds."""

    path: str
    """``fast`` or ``portable``; ``none`` where ``fast`` was demanded but is not proven."""

    why: str
    """In words."""

    report: selfcheck.Report | None
    """The self-check; `None` where it did not run."""


_lock = threading.RLock()
_active: Path | None = None
_status: PathStatus | None = None
# The self-check and what came of it, kept apart from the choice: (report, native path or None, failure).
_proven: tuple[selfcheck.Report, Path | None, str] | None = None


def active() -> Path:
    """The path of this process: the module `iree_marshal.native` or `iree_marshal.portable`.

    Raises
    ------
    UnsupportedRuntimeError
        ``IREE_MARSHAL_PATH=fast``, and the runtime did not pass the self-check.
    ValueError
        ``IREE_MARSHAL_PATH`` is none of its choices.
    """
    if _active is not None:
        return _active
    return _decide()


def status() -> PathStatus:
    """Decide, if that was not done yet, and say what was decided; raises only for a bad ``IREE_MARSHAL_PATH``."""
    with _lock, contextlib.suppress(UnsupportedRuntimeError):
        _decide()
    assert _status is not None
    return _status


@contextlib.contextmanager
def force(path: str) -> Iterator[Path]:
    """Within the block, every call takes one path (for tests; all threads).

    Parameters
    ----------
    path : str
        ``fast``, which must be proven, or ``portable``.
    """
    global _active
    if path not in ("fast", "portable"):
        raise ValueError(f"path: expected 'fast' or 'portable', got {path!r}")
    with _lock:
        chosen = _native_or_raise() if path == "fast" else portable
        previous, _active = _active, chosen
    try:
        yield chosen
    finally:
        with _lock:
            _active = previous


def _choice() -> str:
    choice = os.environ.get(_VARIABLE, "") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{_VARIABLE}: expected one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


def _prove() -> tuple[selfcheck.Report, Path | None, str]:
    """The self-check, run once per process; afterwards the native path is armed."""
    global _proven
    if _proven is None:
        report = selfcheck.prove()
        native, failure = None, report.failure
        if report.ok:
            try:
                from iree_marshal import native as proven

                proven.arm()
                native = proven
            except Exception as error:
                failure = f"opening the native path: {type(error).__name__}: {error}"
        _proven = report, native, failure
    return _proven


def _native_or_raise() -> Path:
    report, native, failure = _prove()
    if native is None:
        raise UnsupportedRuntimeError(_explain(report, failure))
    return native


def _explain(report: selfcheck.Report, failure: str) -> str:
    return (
        f"iree_marshal's native path is not proven on iree-base-runtime {report.version or '(unknown version)'} "
        f"({failure}). Supported: {selfcheck.supported()}, on Linux x86-64. Install one of these, or set "
        f"{_VARIABLE}=portable to use the slower portable path; `python -m iree_marshal doctor` shows every proof"
    )


def _decide() -> Path:
    global _active, _status
    warning = None
    with _lock:
        if _active is not None and _status is not None:
            return _active
        choice = _choice()
        if choice == "portable":
            chosen, _status = portable, PathStatus("portable", f"{_VARIABLE}=portable", None)
        else:
            report, native, failure = _prove()
            if native is not None:
                why = f"every proof holds on iree-base-runtime {report.version or '(unknown version)'}"
                chosen, _status = native, PathStatus("fast", why, report)
            elif choice == "fast":
                _status = PathStatus("none", failure, report)
                raise UnsupportedRuntimeError(_explain(report, failure))
            else:
                chosen, _status = portable, PathStatus("portable", failure, report)
                warning = f"{_explain(report, failure)}. Using the portable path."
        if _active is None:
            _active = chosen
    if warning is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=4)
    return chosen
