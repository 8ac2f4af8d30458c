# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the self-check proves by calling the runtime's functions through the table.

Runs only after everything in `iree_marshal.proofs` holds; for a table that was not
verified for this release, in a child process first. Does not import torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import iree.runtime as rt
import numpy as np

from iree_marshal import _probe
from iree_marshal.subject import Subject, expect

__all__ = ["CALLS"]

# Sets of (memory type, usage) whose answers differ, so that both must be where the table says.
_DISPATCH = int(rt.BufferUsage.DISPATCH_STORAGE)
_TRANSFER = int(rt.BufferUsage.TRANSFER)
_QUERIES = (
    (int(rt.MemoryType.DEVICE_LOCAL), int(rt.BufferUsage.DEFAULT)),
    (int(rt.MemoryType.DEVICE_LOCAL), _TRANSFER),
    (int(rt.MemoryType.DEVICE_LOCAL), _DISPATCH),
    (int(rt.MemoryType.HOST_LOCAL), _TRANSFER),
)

# Codes of a failed import, the same in all releases: a misaligned pointer, an unknown type.
_OUT_OF_RANGE, _UNAVAILABLE = 11, 14
_LARGEST_CODE = 18


def _block(subject: Subject, kind: str, nbytes: int, **fields: tuple[str, int]) -> bytearray:
    """A struct of zeros with these fields, each a (`struct` kind, value), where the table says."""
    block = bytearray(nbytes)
    for name, (code, value) in fields.items():
        struct.pack_into("<" + code, block, subject.table[f"{kind}.{name}"], value)
    return block


def _params(subject: Subject, kind: int, usage: int, access: int, affinity: int) -> bytearray:
    return _block(
        subject,
        "params",
        64,
        usage=("I", usage),
        access=("H", access),
        type=("I", kind),
        queue_affinity=("Q", affinity),
    )


def _external(subject: Subject, kind: int, nbytes: int, pointer: int) -> bytearray:
    return _block(subject, "external", 64, type=("i", kind), size=("Q", nbytes), handle=("Q", pointer))


def prove_queries(subject: Subject) -> None:
    """The host allocator and compatibility queries answer what is known from outside."""
    slots, _ = _probe.slots_used()
    allocator = subject.allocator
    words = _probe.host_allocator(subject.function(allocator, "allocator.slot.host_allocator", slots), allocator)
    expect(words == subject.host_words, f"host allocator {words[0]:#x}, {words[1]:#x}")
    query = subject.function(allocator, "allocator.slot.query_compatibility", slots)
    access, affinity = subject.table["params.access_all"], subject.table["params.queue_affinity_any"]
    for kind, usage in _QUERIES:
        public = subject.device.allocator.query_buffer_compatibility(
            memory_type=kind, allowed_usage=usage, intended_usage=usage, allocation_size=256
        )
        found = _probe.query_compatibility(query, allocator, _params(subject, kind, usage, access, affinity), 256)
        expect(found == public, f"compatibility {found:#x} of type {kind:#x}, usage {usage:#x}; publicly {public:#x}")


def prove_host_memory(subject: Subject) -> None:
    """MALLOC and FREE of the host allocator."""
    self, ctl = subject.host_words
    malloc, free = subject.table["host_allocator.malloc"], subject.table["host_allocator.free"]
    expect(0 <= malloc < free, f"commands {malloc} and {free}")
    status, block = _probe.control(ctl, self, malloc, 96, 0)
    expect(status == 0 and block != 0 and block % 16 == 0, f"MALLOC: status {status:#x}, block {block:#x}")
    _probe.write(block, bytes(range(96)))
    status, _ = _probe.control(ctl, self, free, 0, block)
    expect(status == 0, f"FREE: status {status:#x}")


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


class _Imported:
    """A known, aligned piece of memory, imported with a counting callback."""

    nbytes = 96

    def __init__(self, subject: Subject, access: int, affinity: int) -> None:
        self.memory = np.zeros(self.nbytes + 64, dtype=np.uint8)
        start = -_address(self.memory) % 64
        self.content = self.memory[start : start + self.nbytes]
        self.content[:] = np.arange(self.nbytes) + 5
        table = subject.table
        self.pointer = _address(self.content)
        function, user_data = _probe.release_callback()
        slots, _ = _probe.slots_used()
        status, self.buffer = _probe.import_buffer(
            subject.function(subject.allocator, "allocator.slot.import_buffer", slots),
            subject.allocator,
            _params(subject, table["params.type_device_local"], table["params.usage_default"], access, affinity),
            _external(subject, table["external.device_allocation"], self.nbytes, self.pointer),
            bytes(_block(subject, "callback", 16, fn=("Q", function), user_data=("Q", user_data))),
        )
        expect(status == 0 and self.buffer != 0, f"import: status {status:#x}, buffer {self.buffer:#x}")


def prove_import(subject: Subject) -> None:
    """An import: the buffer it makes, and its release."""
    before = _probe.counts()[0]
    imported = _Imported(subject, int(rt.MemoryAccess.READ) | int(rt.MemoryAccess.WRITE), 0x5)
    buffer = imported.buffer
    _, slots = _probe.slots_used()
    expect(subject.function(buffer, "buffer.slot.recycle", slots) == subject.recycle, "an imported buffer's recycle")
    expect(subject.at(buffer, "resource.ref_count") == 1, "a new buffer's count")
    expect(subject.at(buffer, "buffer.allocated_buffer") == buffer, "an import that is not its own allocation")
    for name, value in (("allocation_size", imported.nbytes), ("byte_offset", 0), ("byte_length", imported.nbytes)):
        found = subject.at(buffer, f"buffer.{name}")
        expect(found == value, f"{name} {found} of an import of {imported.nbytes} bytes")
    access = subject.at(buffer, "buffer.allowed_access")
    expect(access == 3, f"access {access} of an import with access 3")
    affinity = struct.unpack("<Q", subject.read(buffer + subject.table["buffer.placement_device"] + 8, 8))[0]
    expect(affinity == 0x5, f"queue affinity {affinity:#x} of an import with 0x5")
    _probe.retain(buffer)
    expect(not _probe.drop(buffer, subject.recycle) and _probe.counts()[0] == before, "released too early")
    expect(_probe.drop(buffer, subject.recycle), "the last reference was not the last")
    expect(_probe.counts()[0] == before + 1, f"{_probe.counts()[0] - before} callbacks of one released import")


def prove_recycle(subject: Subject) -> None:
    """Recycling hands a buffer without a pool to the destroy function of its own vtable."""
    vtable = bytearray(struct.pack("<Q", _probe.destroy_function()) * 32)
    table_address = _probe.allocate(bytes(vtable))
    fake = _block(subject, "resource", 512, ref_count=("i", 1), vtable=("Q", table_address))
    before = _probe.counts()[2]
    address = _probe.allocate(bytes(fake))
    _probe.drop(address, subject.recycle)
    called = _probe.counts()[2] - before
    _probe.release(address)
    _probe.release(table_address)
    expect(called == 1, f"recycling called destroy {called} times")


def prove_crossing(subject: Subject) -> None:
    """A view of our own making on imported memory, through a list, public and native reads, and release."""
    table = subject.table
    callbacks, frees, _ = _probe.counts()
    imported = _Imported(subject, table["params.access_all"], table["params.queue_affinity_any"])
    shape = (4, 6)
    own, ctl = _probe.view_allocator()
    content = bytearray(table["view.dims"] + 8 * len(shape))
    host = table["view.host_allocator"]
    struct.pack_into("<i", content, table["view.ref_count"], 1)
    struct.pack_into("<Q", content, host + table["host_allocator.self"], own)
    struct.pack_into("<Q", content, host + table["host_allocator.ctl"], ctl)
    struct.pack_into("<Q", content, table["view.buffer"], imported.buffer)
    struct.pack_into("<I", content, table["view.element_type"], int(rt.HalElementType.FLOAT_32))
    struct.pack_into("<I", content, table["view.encoding_type"], table["view.encoding_dense"])
    struct.pack_into("<Q", content, table["view.byte_length"], imported.nbytes)
    struct.pack_into("<Q", content, table["view.rank"], len(shape))
    struct.pack_into("<2q", content, table["view.dims"], *shape)
    variants = rt.VmVariantList(1)
    native = subject.pointer_in(variants)
    storage = subject.at(native, "list.storage")
    _probe.write(storage + table["variant.type"], struct.pack("<Q", subject.view_type))
    _probe.write(storage + table["variant.value"], struct.pack("<Q", _probe.allocate(bytes(content))))
    _probe.write(storage + table["variant.ref_type"], struct.pack("<Q", subject.view_type))
    _probe.write(native + table["list.count"], struct.pack("<Q", 1))

    view = variants.get_as_object(0, rt.HalBufferView)
    expect(tuple(view.shape) == shape, f"shape {tuple(view.shape)} of a native view of {shape}")
    expect(int(view.element_type) == int(rt.HalElementType.FLOAT_32), "the element type of a native view")
    # Through the runtime into our memory. Not `map().asarray()`: iree-base-runtime 3.11 leaks what it returns.
    expected = imported.content.copy()
    expected[16:56] = 0
    view.get_buffer().fill_zero(byte_offset=16, byte_length=40)
    expect(bool(np.array_equal(imported.content, expected)), "a native view does not share memory")

    # As if it were a part of an allocation: every host buffer of the runtime's own making has offset 0.
    offset = imported.buffer + table["buffer.byte_offset"]
    length = imported.buffer + table["buffer.byte_length"]
    _probe.write(offset, struct.pack("<Q", 64))
    _probe.write(length, struct.pack("<Q", imported.nbytes - 64))
    try:
        shown = view.get_buffer().byte_length()
        view.get_buffer().fill_zero(byte_offset=4, byte_length=8)
    finally:
        _probe.write(offset, struct.pack("<Q", 0))
        _probe.write(length, struct.pack("<Q", imported.nbytes))
    expected[68:76] = 0
    expect(shown == imported.nbytes - 64, f"a changed length shows as {shown}")
    expect(bool(np.array_equal(imported.content, expected)), "a changed byte offset moves nothing")

    slots, _ = _probe.slots_used()
    export = subject.function(subject.allocator, "allocator.slot.export_buffer", slots)
    for kind in (table["external.device_allocation"], table["external.host_allocation"]):
        external = bytearray(64)
        status = _probe.export_buffer(export, subject.allocator, imported.buffer, kind, 0x3, external)
        expect(status == 0, f"export: status {status:#x}")
        expected = _external(subject, kind, imported.nbytes, imported.pointer)
        struct.pack_into("<I", expected, table["external.flags"], 0x3)
        expect(external == expected, f"exported {external[:32].hex()} instead of {expected[:32].hex()}")
    refused = (table["external.host_allocation"] - 1, table["external.device_allocation"] + 1)
    for kind in refused:
        status = _probe.export_buffer(export, subject.allocator, imported.buffer, kind, 0, bytearray(64))
        _check_status(subject, status, _UNAVAILABLE, f"an export of type {kind}")

    del view
    expect(_probe.counts()[:2] == (callbacks, frees), "released while the list lives")
    del variants
    called, freed = _probe.counts()[0] - callbacks, _probe.counts()[1] - frees
    expect((called, freed) == (1, 1), f"{called} callbacks and {freed} frees when the list was dropped")


def _check_status(subject: Subject, status: int, code: int, what: str) -> None:
    """Take a failed status apart, as errors are reported, and free it."""
    mask = subject.table["status.code_mask"]
    expect(mask & (mask + 1) == 0 and mask >= _LARGEST_CODE, f"the mask {mask:#x} of status codes")
    expect(status & mask == code, f"{what}: code {status & mask} instead of {code}")
    storage = status & ~mask
    expect(storage != 0 and storage % (mask + 1) == 0, f"{what}: a status without a message")
    length = subject.at(storage, "status.message_length")
    expect(0 < length < 4096, f"{what}: a message of {length} bytes")
    text = subject.read(subject.at(storage, "status.message"), length)
    expect(text.isascii() and text.decode("ascii", "replace").isprintable(), f"{what}: the message {text!r}")
    expect(subject.at(storage, "status.payload_head") == 0, f"{what}: a status with payloads")
    _probe.release(storage)


def prove_failures(subject: Subject) -> None:
    """A failed import: its code and message, and no callback."""
    table = subject.table
    slots, _ = _probe.slots_used()
    function = subject.function(subject.allocator, "allocator.slot.import_buffer", slots)
    words = bytes(_block(subject, "callback", 16, fn=("Q", 0), user_data=("Q", 0)))
    memory = np.zeros(192, dtype=np.uint8)
    aligned = _address(memory) + -_address(memory) % 64
    params = _params(
        subject,
        table["params.type_device_local"],
        table["params.usage_default"],
        table["params.access_all"],
        table["params.queue_affinity_any"],
    )
    for kind, pointer, code in (
        (table["external.device_allocation"], aligned + 4, _OUT_OF_RANGE),
        (table["external.device_allocation"] + 1, aligned, _UNAVAILABLE),
    ):
        external = _external(subject, kind, 64, pointer)
        status, buffer = _probe.import_buffer(function, subject.allocator, bytearray(params), external, words)
        expect(buffer == 0, "a failed import made a buffer")
        _check_status(subject, status, code, f"an import of type {kind} at {pointer % 64} past alignment")


def prove_device_calls(subject: Subject) -> None:
    """A device names its allocator, and its destroy function lets go of it."""
    device = rt.get_driver("local-sync").create_default_device()
    address = subject.pointer_in(device)
    found = _probe.device_allocator(subject.function(address, "device.slot.device_allocator", 4), address)
    allocator = subject.pointer_in(device.allocator)
    expect(found == allocator, f"allocator {found:#x} instead of {allocator:#x}")
    destroy = subject.function(address, "device.slot.destroy", 4)
    destroy_allocator = subject.function(allocator, "device.slot.destroy", 4)
    _probe.retain(allocator)
    _probe.retain(address)
    del device
    count, held = subject.at(address, "resource.ref_count"), subject.at(allocator, "resource.ref_count")
    expect(count == 1 and held > 1, f"counts {count} and {held} of a device and its allocator")
    _probe.drop(address, destroy)
    left = subject.at(allocator, "resource.ref_count")
    expect(left == held - 1, f"the allocator's count is {left} instead of {held - 1} after its device was destroyed")
    # The devices of one driver share it, so this is not the last reference. For every HAL object
    # but buffers, destroy is the same slot.
    _probe.drop(allocator, destroy_allocator)


CALLS: tuple[Callable[[Subject], None], ...] = (
    prove_queries,
    prove_host_memory,
    prove_import,
    prove_recycle,
    prove_crossing,
    prove_failures,
    prove_device_calls,
)
