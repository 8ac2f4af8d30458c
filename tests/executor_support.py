# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tests of `Executor` share: an executor on either path, and what is alive."""

from __future__ import annotations

import ctypes
import gc
import resource
from typing import Any

import executor_modules as modules
import pytest
import releases
import torch

from iree_marshal import _lifetime, paths
from iree_marshal.executor import Executor

BOTH_PATHS = pytest.mark.parametrize("path", ["native", "portable"])


def executor(program: str, *flags: str, path: str = "native", **options: Any) -> Executor:
    """Load a program, to be called natively or through public calls alone."""
    module = modules.compiled(program, *flags)
    with paths.force("fast" if path == "native" else "portable"):
        made = Executor.load(module, **options)
    assert type(made._engine).__name__ == ("NativeEngine" if path == "native" else "PortableEngine")
    return made


def with_f32(program: str, path: str, *flags: str) -> Executor:
    """As `executor`, a program that takes an f32 scalar."""
    if path == "portable" and releases.TAKES_LOW_BYTES:
        pytest.skip("the portable path refuses f32 scalars on this release")
    return executor(program, *flags, path=path)


def live() -> tuple[int, int, int]:
    """Tensors held by IREE, buffers held by torch, blocks of import bookkeeping."""
    gc.collect()
    counts: tuple[int, int, int] = _lifetime.live_counts()
    return counts


def resident_bytes() -> int:
    """Physical memory of this process, without what its allocator has free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - not a file of bytes on a disk
        return int(file.read().split()[1]) * resource.getpagesize()


def aligned(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.0) -> torch.Tensor:
    """A tensor of ascending numbers whose memory is aligned as an import needs it."""
    count = 1
    for size in shape:
        count *= size
    tensor = (torch.arange(count, dtype=torch.float64) + start).to(dtype).reshape(shape)
    assert tensor.data_ptr() % 64 == 0
    return tensor
