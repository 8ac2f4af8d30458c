# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A call that is under way."""

from __future__ import annotations

import abc
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import iree.runtime as rt

__all__ = ["FencePending", "Pending", "ThreadPending"]


class Pending(abc.ABC):
    """A call that is under way; what `Executor.submit` returns.

    Safe to ask from many threads. One that is dropped without being asked runs to its end all the same.
    """

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the work is done or has failed; never blocks."""

    @abc.abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait for the work and hand out what the call returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; by default as long as it takes.

        Returns
        -------
        object
            What the call would have returned; the same objects each time.

        Raises
        ------
        TimeoutError
            Not done in time; the call goes on.
        Exception
            What the work failed with.
        """

    def __repr__(self) -> str:
        return f"<Pending {'done' if self.done() else 'running'}>"


class FencePending(Pending):
    """Of a function that returns before its work is done and signals a fence then.

    Parameters
    ----------
    fence : iree.runtime.HalFence
        Signaled, or failed, by IREE.
    collect : callable
        Hands out the results; called once, after the signal.
    abandon : callable
        Called instead when the work failed.
    """

    def __init__(self, fence: rt.HalFence, collect: Callable[[], Any], abandon: Callable[[], None]) -> None:
        self._fence = fence
        self._collect: Callable[[], Any] | None = collect
        self._abandon: Callable[[], None] | None = abandon
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """See `Pending.done`."""
        if self._collect is None:
            return True
        try:
            return bool(self._fence.wait(timeout=0))
        except RuntimeError:
            return True

    def result(self, timeout: float | None = None) -> Any:
        """See `Pending.result`."""
        failure: RuntimeError | None = None
        if self._collect is not None:
            try:
                nanoseconds = None if timeout is None else max(int(timeout * 1e9), 0)
                arrived = self._fence.wait() if nanoseconds is None else self._fence.wait(timeout=nanoseconds)
                if not arrived:
                    raise TimeoutError(f"the call is not done after {timeout} s")
            except RuntimeError as error:
                failure = error
        with self._lock:
            if self._collect is not None and self._abandon is not None:
                try:
                    if failure is None:
                        self._value = self._collect()
                    else:
                        self._error = failure
                        self._abandon()
                except Exception as error:
                    self._error = error
                # They hold the arguments.
                self._collect = self._abandon = None
        if self._error is not None:
            raise self._error
        return self._value


class ThreadPending(Pending):
    """Of a function that runs to its end in a worker thread."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """See `Pending.done`."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """See `Pending.result`."""
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            # Before Python 3.11 that is a class of its own; and the work may have failed with one itself.
            if self._future.done():
                raise
            raise TimeoutError(f"the call is not done after {timeout} s") from None
