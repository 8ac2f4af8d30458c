# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The objects that the self-check examines, and how their memory is read.

Reads go through the kernel, so that a wrong layout ends in an error and not in a crash.
Does not import torch.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np

__all__ = ["OFFSET_KINDS", "SHAPES", "Refused", "Subject", "expect", "keep_instance", "read_memory", "ref_address"]

_PAGE_LIMIT = 1 << 47  # user addresses of x86-64 lie below
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (4, 3), (2, 9, 5), (2, 3, 5, 7))

# The `struct` kinds of fields that are not 8 bytes wide.
OFFSET_KINDS = {
    "py_instance.offset": "i",
    "py_instance.state": "I",
    "list.ref_count": "i",
    "list.storage_mode": "i",
    "view.ref_count": "i",
    "view.element_type": "I",
    "view.encoding_type": "I",
    "resource.ref_count": "i",
    "buffer.memory_type": "I",
    "buffer.allowed_usage": "I",
    "buffer.allowed_access": "H",
    "params.usage": "I",
    "params.access": "H",
    "params.type": "I",
    "external.type": "i",
    "external.flags": "I",
}


class Refused(Exception):  # noqa: N818 - an outcome rather than an error
    """A proof that did not hold; the text says what was found."""


def expect(holds: bool, text: str) -> None:
    """Refuse unless a condition holds."""
    if not holds:
        raise Refused(text)


def read_memory(address: int, nbytes: int) -> bytes:
    """Read this process's own memory through the kernel.

    Parameters
    ----------
    address : int
        Any number.
    nbytes : int
        How much to read.

    Returns
    -------
    bytes
        Exactly `nbytes` of them.

    Raises
    ------
    OSError
        Nothing (or not enough) is mapped there. The process never crashes.
    """
    descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(descriptor, address, nbytes)
    finally:
        os.close(descriptor)


def _read(memory: int, address: int, nbytes: int) -> bytes:
    if not 0 <= address < _PAGE_LIMIT:
        raise OSError(f"no memory at {address:#x}")
    content = os.pread(memory, nbytes, address)
    if len(content) != nbytes:
        raise OSError(f"only {len(content)} of {nbytes} bytes are mapped at {address:#x}")
    return content


def _runtime_code() -> list[tuple[int, int]]:
    """Address ranges of the runtime's executable memory."""
    library = str(Path(sys.modules[rt.VmInstance.__module__].__file__ or "").resolve())
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and "x" in fields[1] and fields[5] == library:
            first, last = fields[0].split("-")
            ranges.append((int(first, 16), int(last, 16)))
    return ranges


_instance: rt.VmInstance | None = None


def keep_instance() -> None:
    """Make sure that a VM instance exists: a list made before the first one crashes the process."""
    global _instance
    devices = sys.modules.get("iree_marshal.devices")
    if devices is not None:
        devices.vm_instance()
    elif _instance is None:
        _instance = rt.VmInstance()


class Subject:
    """The objects that are examined, with the table they are examined by."""

    def __init__(self, table: Mapping[str, int]) -> None:
        keep_instance()
        self.table = table
        self.code = _runtime_code()
        self.device = rt.get_driver("local-sync").create_default_device()
        self.variants = rt.VmVariantList(5)
        self.views = [self.new_view(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)) for shape in SHAPES]
        self.memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        # Filled in by the reads.
        self.list_address = 0
        self.allocator = 0
        self.host_words = (0, 0)
        self.view_type = 0
        self.recycle = 0

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.memory)

    def new_view(self, content: np.ndarray[Any, Any]) -> rt.HalBufferView:
        """A buffer view of the runtime's own making."""
        return self.device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE,
            allowed_usage=rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING,
            device=self.device,
            buffer=content,
            element_type=rt.HalElementType.FLOAT_32,
        )

    # ---- reading by the table --------------------------------------------------------------

    def at(self, address: int, name: str) -> int:
        """The number in the field that the table names."""
        kind = OFFSET_KINDS.get(name, "Q")
        return int(struct.unpack("<" + kind, self.read(address + self.table[name], struct.calcsize(kind)))[0])

    def read(self, address: int, nbytes: int) -> bytes:
        """As `read_memory`."""
        return _read(self.memory, address, nbytes)

    def is_code(self, address: int) -> bool:
        """Whether an address lies in the runtime's executable memory."""
        return any(first <= address < last for first, last in self.code)

    def pointer_in(self, instance: object) -> int:
        """The native pointer inside a Python object of the runtime."""
        table = self.table
        offset = self.at(id(instance), "py_instance.offset")
        state = self.at(id(instance), "py_instance.state")
        expect(
            state & table["py_instance.state_mask"] == table["py_instance.state_ready"],
            f"{type(instance).__name__}: state {state:#x} is not that of an initialised instance",
        )
        expect(
            offset % 8 == 0 and table["py_instance.state"] + 4 <= offset <= 256,
            f"{type(instance).__name__}: payload at {offset}",
        )
        return int(struct.unpack("<Q", self.read(id(instance) + offset, 8))[0])

    def vtable(self, resource: int, used: int) -> int:
        """The vtable of a HAL resource, whose first slots must be code of the runtime."""
        vtable = self.at(resource, "resource.vtable")
        for slot, function in enumerate(struct.unpack(f"<{used}Q", self.read(vtable, 8 * used))):
            expect(self.is_code(function), f"slot {slot} of the vtable at {vtable:#x} holds no code of the runtime")
        return vtable

    def function(self, resource: int, slot: str, used: int) -> int:
        """The function in one slot of a resource's vtable."""
        vtable = self.vtable(resource, used)
        number = self.table[slot]
        expect(0 <= number < used, f"{slot}: {number} is none of the first {used}")
        return int(struct.unpack("<Q", self.read(vtable + 8 * number, 8))[0])

    def host_pair(self, address: int, name: str) -> tuple[int, int]:
        """The words (self, ctl) of the host allocator at the offset that the table names."""
        start = address + self.table[name]
        return self.at(start, "host_allocator.self"), self.at(start, "host_allocator.ctl")

    def variant(self, index: int) -> int:
        """The address of one variant of the list."""
        return self.at(self.list_address, "list.storage") + index * self.table["variant.size"]


def ref_address(instance: Any) -> int:
    """The address that the runtime prints for an object's reference."""
    found = re.search(r"0x([0-9a-fA-F]+)", repr(instance.ref))
    expect(found is not None, f"no address in {instance.ref!r}")
    assert found is not None
    return int(found[1], 16)
