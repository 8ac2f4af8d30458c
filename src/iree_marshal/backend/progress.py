# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One line on standard error that says what is being compiled and for how long.

Compiling a real model takes seconds to minutes; silence reads as a hang. A terminal gets a moving bar, a file or a pipe
one line at the start (after a second, so that small graphs stay quiet) and one at the end. Silence it like any logger::

    logging.getLogger("iree_marshal.compile").setLevel(logging.WARNING)

or with ``IREE_MARSHAL_LOGS=warning`` in the environment (any level name of :mod:`logging`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType

log = logging.getLogger("iree_marshal.compile")

_BAR_WIDTH = 16
_TICK_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0


def _level_from_environment() -> None:
    name = os.environ.get("IREE_MARSHAL_LOGS", "").strip().upper()
    if not name:
        return
    level = logging.getLevelNamesMapping().get(name) if hasattr(logging, "getLevelNamesMapping") else None
    if level is None:
        # Python 3.10 has no public map of names; getLevelName answers a number for a known name.
        known = logging.getLevelName(name)
        level = known if isinstance(known, int) else None
    if level is None:
        log.warning("IREE_MARSHAL_LOGS=%s is no logging level (debug, info, warning, error); ignored", name)
        return
    log.setLevel(level)


_level_from_environment()


def wanted() -> bool:
    """Say whether progress may be shown: unless the logger was set to something quieter than ``INFO``."""
    return log.level in (logging.NOTSET, logging.DEBUG, logging.INFO)


class Progress:
    """Shows ``what`` and the elapsed seconds while the ``with`` block runs.

    Parameters
    ----------
    what : str
        What is being done, with the graph's name in it: ``"compiling graph 3 (inference) for cpu"``.

    Notes
    -----
    The line is drawn by a daemon thread, because the work itself blocks in a child process.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._shown = False
        self._terminal = False

    @property
    def elapsed(self) -> float:
        """Seconds since the block was entered."""
        return time.monotonic() - self._started

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        log.debug("%s: started", self._what)
        if wanted():
            self._terminal = sys.stderr is not None and sys.stderr.isatty()
            self._thread = threading.Thread(target=self._draw, name="iree_marshal-progress", daemon=True)
            self._thread.start()
        return self

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            # A closed or missing stderr must not fail a compilation.
            self._stop.set()

    def _draw(self) -> None:
        if self._stop.wait(_TICK_SECONDS if self._terminal else _PATIENCE_SECONDS):
            return
        self._shown = True
        if not self._terminal:
            self._write(f"iree_marshal: {self._what} ...\n")
            return
        step = 0
        while True:
            # iree-compile reports no fraction done: the block wanders, the seconds tell.
            place = step % (2 * (_BAR_WIDTH - 3))
            place = min(place, 2 * (_BAR_WIDTH - 3) - place)
            bar = " " * place + "===" + " " * (_BAR_WIDTH - 3 - place)
            self._write(f"\riree_marshal: {self._what} [{bar}] {self.elapsed:5.1f} s ")
            step += 1
            if self._stop.wait(_TICK_SECONDS):
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        end = "failed after" if kind is not None else "done in"
        if self._shown:
            start = "\r\x1b[2K" if self._terminal else ""
            self._write(f"{start}iree_marshal: {self._what}: {end} {self.elapsed:.1f} s\n")
        log.debug("%s: %s %.1f s", self._what, end, self.elapsed)
