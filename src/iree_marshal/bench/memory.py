# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much memory an imported tensor costs."""

from __future__ import annotations

import ctypes
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from iree_marshal import marshal
from iree_marshal.bench.cases import Fixture

__all__ = ["memory_per_import"]


class _MallocInfo(ctypes.Structure):
    # glibc's struct mallinfo2; only the bytes in use are read.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _native_bytes() -> int:
    """Bytes that the C heap has handed out."""
    query = ctypes.CDLL(None).mallinfo2
    query.restype = _MallocInfo
    found = query()
    return int(found.uordblks + found.hblkhd)


def memory_per_import(fixture: Fixture, count: int = 10_000) -> dict[str, dict[str, Any]]:
    """Bytes that one imported tensor costs while its list lives, and what stays afterwards.

    The C heap is asked directly, Python's own pools through `tracemalloc` in a second
    pass; what Python takes from the C heap is counted twice, so the figure is an upper bound.

    Returns
    -------
    dict
        Figures as in the ``derived`` part of a report; empty where the C library cannot tell
        what it has handed out (glibc before 2.33, other C libraries).
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return {}
    tensors = fixture.tensors(count)

    def difference(query: Callable[[], int]) -> tuple[float, float]:
        before = query()
        variants = marshal.to_variant_list(tensors)
        alive = query()
        del variants
        marshal.to_variant_list([])  # takes back what release callbacks have queued
        return (alive - before) / count, (query() - before) / count

    with torch.no_grad():
        difference(lambda: 0)
        native = difference(_native_bytes)
        tracemalloc.start()
        try:
            python = difference(lambda: tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    titles = ("memory per imported tensor while the list lives", "memory left per tensor after the list is dropped")
    return {
        name: {"title": title, "unit": "bytes", "value": heap + pools, "iqr": 0.0}
        for name, title, heap, pools in zip(("memory.live", "memory.left"), titles, native, python, strict=True)
    }
