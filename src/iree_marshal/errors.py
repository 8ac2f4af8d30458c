# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The package's own exception, and the words that errors share."""

from __future__ import annotations

__all__ = ["FORKED", "UnsupportedRuntimeError", "where"]

FORKED = (
    "iree_marshal was used before this process was forked: IREE's threads and devices do not survive a fork. "
    "Start the process with the 'spawn' method, or make the first call after the fork."
)


class UnsupportedRuntimeError(RuntimeError):
    """The native path was demanded, but this runtime did not pass the self-check."""


def where(path: tuple[int, ...]) -> str:
    """Name an element by its place: ``element 3``, and ``element 3[1]`` inside a nested list."""
    if not path:
        return "the list"
    return f"element {path[0]}" + "".join(f"[{index}]" for index in path[1:])
