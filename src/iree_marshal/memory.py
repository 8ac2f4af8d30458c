# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is held on each device, by IREE, by torch and across the border, and how to give it back."""

from __future__ import annotations

from typing import Any

import iree.runtime as rt
import torch

from iree_marshal import devices, paths

__all__ = ["memory_stats", "trim_device"]


def memory_stats() -> dict[str, dict[str, Any]]:
    """What is alive on each device that was used so far.

    Returns
    -------
    dict
        Per torch device (``"cpu"``, ``"cuda:0"``):

        ``imports``, ``import_bytes``
            Tensors that IREE holds: arguments in lists, buffers and work in flight.
        ``exports``, ``export_bytes``
            Buffers of IREE that torch tensors and `HalArray` objects hold.
        ``iree``
            What IREE's allocator says, summed over the HAL devices of that torch device: bytes allocated, freed and at
            the peak, on the host and on the device.
        ``torch``
            What torch's caching allocator says: ``allocated_bytes``, ``reserved_bytes``; empty on the CPU, where torch
            keeps no account.

        The four counts are `None` on the portable path, which keeps none.
    """
    devices.check_not_forked()
    count = None
    if paths.active().__name__ == "iree_marshal.native":
        from iree_marshal._executor import count_live

        count = count_live
    stats: dict[str, dict[str, Any]] = {}
    for hal_device, torch_device in devices.known_devices():
        entry = stats.setdefault(
            str(torch_device),
            {
                **dict.fromkeys(("imports", "import_bytes", "exports", "export_bytes"), None if count is None else 0),
                "iree": {},
                "torch": _torch_stats(torch_device),
            },
        )
        if count is not None:
            for key, value in count(hal_device).items():
                entry[key] += value
        for key, value in hal_device.allocator.statistics.items():
            entry["iree"][key] = entry["iree"].get(key, 0) + value
    return stats


def _torch_stats(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
    }


def trim_device(hal_device: rt.HalDevice) -> None:
    """Have IREE's allocator give unused memory back."""
    with devices.current(devices.torch_device_of(hal_device)):
        hal_device.allocator.trim()
