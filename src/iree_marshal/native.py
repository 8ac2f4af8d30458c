# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native path: the crossing through IREE's own C functions.

`iree_marshal.paths` hands it out only after the self-check has proven every layout
that it relies on. Its functions agree with `iree_marshal.portable` on every input.
"""

from __future__ import annotations

import iree.runtime as rt

from iree_marshal import _cuda, _objects, devices
from iree_marshal._exporting import from_variant_list
from iree_marshal._importing import to_variant_list

__all__ = ["arm", "from_variant_list", "order", "record_stream", "to_variant_list"]


def arm() -> None:
    """Learn this process's type words and vtables; called once, after the self-check has passed."""
    devices.vm_instance()
    _objects.arm(rt.get_driver("local-sync").create_default_device())


def order(hal_device: rt.HalDevice) -> None:
    """Make IREE's stream wait for what torch's current stream was given so far."""
    _cuda.order(_objects.native_device(hal_device))


def record_stream(hal_device: rt.HalDevice, stream: int) -> None:
    """Make dropped results of this device wait for `stream` (a native handle) as well."""
    _cuda.record_stream(_objects.native_device(hal_device), stream)
