# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Zero-copy crossing between PyTorch tensors and IREE's runtime.

`to_variant_list` and `from_variant_list` are the entry points of custom executors;
`Executor` does a whole invocation in one call; `HalArray` shows one HAL buffer to any
array library. Importing this package checks nothing and starts nothing: the first call
does (see `python -m iree_marshal doctor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iree_marshal.arrays import HalArray
from iree_marshal.devices import hal_device, register_device
from iree_marshal.errors import UnsupportedRuntimeError
from iree_marshal.marshal import from_variant_list, order, record_stream, to_variant_list
from iree_marshal.memory import memory_stats

if TYPE_CHECKING:
    from iree_marshal.executor import Executor

__version__ = "0.1.0"

__all__ = [
    "Executor",
    "HalArray",
    "UnsupportedRuntimeError",
    "__version__",
    "from_variant_list",
    "hal_device",
    "memory_stats",
    "order",
    "record_stream",
    "register_device",
    "to_variant_list",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: most custom executors never need it.
    if name == "Executor":
        from iree_marshal.executor import Executor

        return Executor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
