# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the self-check proves, step by step: first by reading known objects, then by calling.

Objects are made through the public API of iree.runtime, so that what their memory must
hold is known. Reads go through the kernel, so that a wrong layout ends in an error and
not in a crash. A step relies on those before it; no function of the runtime is called
through a table before every read has been proven. Does not import torch.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np

from iree_marshal import _probe

__all__ = ["CALLS", "READS", "Refused", "Subject", "read_memory"]

_CANARY = 0x1122334455667788
_FLOAT_CANARY = -2.718281828459045
_PAGE_LIMIT = 1 << 47  # user addresses of x86-64 lie below
_SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (4, 3), (2, 9, 5), (2, 3, 5, 7))

# Offsets of a buffer's memory type, allowed usage and allowed access in releases that are not
# supported (3.0; 3.1 to 3.3). They are only read, to tell the layouts apart.
_OLDER_TAILS = ((72, 76, 80), (80, 84, 88))

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
        self.memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        self.code = _runtime_code()
        self.device = rt.get_driver("local-sync").create_default_device()
        self.variants = rt.VmVariantList(5)
        self.views = [self.new_view(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)) for shape in _SHAPES]
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

    def at(self, address: int, name: str, kind: str = "Q") -> int:
        """The number of a `struct` kind at the offset that the table names."""
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
        offset = self.at(id(instance), "py_instance.offset", "i")
        state = self.at(id(instance), "py_instance.state", "I")
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


def _ref_address(instance: Any) -> int:
    """The address that the runtime prints for an object's reference."""
    found = re.search(r"0x([0-9a-fA-F]+)", repr(instance.ref))
    expect(found is not None, f"no address in {instance.ref!r}")
    assert found is not None
    return int(found[1], 16)


# ---- reads ------------------------------------------------------------------------------------


def prove_platform(subject: Subject) -> None:
    """Linux x86-64 and a CPython with a GIL."""
    machine = os.uname()
    expect(sys.platform == "linux" and machine.machine == "x86_64", f"{sys.platform} {machine.machine}")
    expect(sys.byteorder == "little" and struct.calcsize("P") == 8, "not 64-bit little endian")
    expect(sys.implementation.name == "cpython", f"{sys.implementation.name} instead of CPython")
    expect(not sysconfig.get_config_var("Py_GIL_DISABLED"), "a CPython build without the GIL")
    expect(object.__basicsize__ == 16, f"an object header of {object.__basicsize__} bytes")
    expect(bool(subject.code), "no executable mapping of the runtime library")


def prove_instances(subject: Subject) -> None:
    """The native pointer inside a Python object is the address that its `.ref` prints."""
    table = subject.table
    # Uninitialised, relinquished and indirect instances differ from READY in these three bits.
    expect(table["py_instance.state_mask"] & 7 == 7, "the mask leaves a state bit out")
    view = subject.views[2]
    for instance in (subject.variants, view, view.get_buffer()):
        pointer = subject.pointer_in(instance)
        expect(
            pointer == _ref_address(instance),
            f"{type(instance).__name__}: found {pointer:#x}, its reference says {_ref_address(instance):#x}",
        )
    raw = rt.VmVariantList.__new__(rt.VmVariantList)
    try:
        subject.pointer_in(raw)
    except Refused:
        return
    raise Refused("an uninitialised instance looks like an initialised one")


def prove_list(subject: Subject) -> None:
    """The head of a list, before and after pushes."""
    table, variants = subject.table, subject.variants
    address = subject.list_address = subject.pointer_in(variants)
    view = subject.views[2]
    capacities, counts = [], []
    for push in (
        lambda: None,
        lambda: variants.push_int(_CANARY),
        lambda: variants.push_float(_FLOAT_CANARY),
        lambda: variants.push_ref(view),
        lambda: variants.push_ref(view.get_buffer()),
        lambda: variants.push_list(rt.VmVariantList(1)),
        lambda: variants.push_int(~_CANARY),
    ):
        push()
        counts.append(subject.at(address, "list.count"))
        capacities.append(subject.at(address, "list.capacity"))
    expect(counts == list(range(7)), f"counts of a growing list: {counts}")
    expect(len(set(capacities)) == 1 and 6 < capacities[0] < 1 << 16, f"capacities of a list for 5: {capacities}")
    expect(subject.at(address, "list.element_type") == 0, "the element type of a variant list")
    size = subject.at(address, "list.element_size")
    expect(size == table["variant.size"], f"elements of {size} bytes")
    mode = subject.at(address, "list.storage_mode", "i")
    expect(mode == table["list.storage_mode_variant"], f"storage mode {mode}")
    subject.host_words = subject.host_pair(address, "list.host_allocator")
    expect(
        subject.host_words[0] == 0 and subject.is_code(subject.host_words[1]),
        f"no host allocator: {subject.host_words[0]:#x}, {subject.host_words[1]:#x}",
    )


def prove_variants(subject: Subject) -> None:
    """Integers, floats, null and references as a list stores them."""
    table = subject.table
    view = subject.views[2]
    number, real, last = subject.variant(0), subject.variant(1), subject.variant(5)
    for address, value in ((number, _CANARY), (last, ~_CANARY)):
        expect(subject.at(address, "variant.type") == table["value_type.i64"], "the type of an integer")
        expect(subject.at(address, "variant.value", "q") == value, "the value of an integer")
    expect(subject.at(real, "variant.type") == table["value_type.f64"], "the type of a float")
    value = subject.read(real + table["variant.value"], 8)
    expect(value == struct.pack("<d", _FLOAT_CANARY), "the value of a float")
    for index, pointer in ((2, _ref_address(view)), (3, _ref_address(view.get_buffer()))):
        address = subject.variant(index)
        kind = subject.at(address, "variant.type")
        expect(kind > 7 and kind % 8 == 0, f"the type word of a reference: {kind:#x}")
        expect(subject.at(address, "variant.ref_type") == kind, "the two type words of a reference")
        expect(subject.at(address, "variant.value") == pointer, "the pointer of a reference")
    unused = subject.read(subject.variant(6), table["variant.size"])
    expect(not any(unused), "a variant past the end is not a null reference")


def prove_descriptors(subject: Subject) -> None:
    """Type words lead to descriptors with the right names."""
    for index, name in ((2, b"hal.buffer_view"), (3, b"hal.buffer"), (4, b"vm.list")):
        descriptor = subject.at(subject.variant(index), "variant.type")
        expect(subject.is_code(subject.at(descriptor, "descriptor.destroy")), f"{name!r}: destroy is no code")
        length = subject.at(descriptor, "descriptor.name_length")
        expect(length == len(name), f"{name!r}: a name of {length} bytes")
        found = subject.read(subject.at(descriptor, "descriptor.name"), length)
        expect(found == name, f"a type named {found!r} instead of {name!r}")
    subject.view_type = subject.at(subject.variant(2), "variant.type")


def prove_value_types(subject: Subject) -> None:
    """Each type number, written into a list of integers, is what the public API reads."""
    table = subject.table
    names = ("none", "i8", "i16", "i32", "i64", "f32", "f64")
    numbers = [table[f"value_type.{name}"] for name in names]
    expect(sorted(numbers) == list(range(7)), f"type numbers {numbers}")
    integers = rt.VmVariantList(len(names))
    for _ in names:
        integers.push_int(0)
    storage = subject.at(subject.pointer_in(integers), "list.storage")
    for index, number in enumerate(numbers):
        _probe.write(storage + index * table["variant.size"] + table["variant.type"], struct.pack("<Q", number))
        record = integers.get_serialized_trace_value(index)
        name = "null" if index == 0 else names[index]
        expect(name in record or record.get("type") == name, f"{names[index]} is read as {record}")


def prove_views(subject: Subject) -> None:
    """Every field of buffer views of rank 0 to 4 against the public properties."""
    table = subject.table
    for view, shape in zip(subject.views, _SHAPES, strict=True):
        address = subject.pointer_in(view)
        rank = subject.at(address, "view.rank")
        expect(rank == len(shape) == len(view.shape), f"rank {rank} of {shape}")
        dims = struct.unpack(f"<{rank}q", subject.read(address + table["view.dims"], 8 * rank))
        expect(dims == shape == tuple(view.shape), f"sizes {dims} of {shape}")
        element_type = subject.at(address, "view.element_type", "I")
        expect(element_type == int(view.element_type), f"element type {element_type:#x}")
        encoding = subject.at(address, "view.encoding_type", "I")
        expect(encoding == table["view.encoding_dense"], f"encoding {encoding}")
        nbytes = subject.at(address, "view.byte_length")
        expect(nbytes == view.byte_length == view.get_buffer().byte_length(), f"length {nbytes}")
        buffer = subject.at(address, "view.buffer")
        expect(buffer == _ref_address(view.get_buffer()), f"buffer at {buffer:#x}")
        words = subject.host_pair(address, "view.host_allocator")
        expect(words == subject.host_words, "the host allocator differs from the list's")


def prove_counts(subject: Subject) -> None:
    """A reference count rises by exactly one while a reference lives."""
    view = subject.views[1]
    buffer = view.get_buffer()
    for instance, name in ((subject.variants, "list"), (view, "view"), (buffer, "resource")):
        address = subject.pointer_in(instance)
        before = subject.at(address, f"{name}.ref_count", "i")
        reference = instance.ref
        during = subject.at(address, f"{name}.ref_count", "i")
        del reference
        after = subject.at(address, f"{name}.ref_count", "i")
        expect(
            0 < before == after == during - 1,
            f"{type(instance).__name__}: count {before}, {during} with one more reference, then {after}",
        )


def prove_buffers(subject: Subject) -> None:
    """The head of a buffer, and which releases' layout it has."""
    table = subject.table
    tails = (
        *_OLDER_TAILS,
        (table["buffer.memory_type"], table["buffer.allowed_usage"], table["buffer.allowed_access"]),
    )
    _, slots = _probe.slots_used()
    for view in subject.views[1:]:
        buffer = view.get_buffer()
        address = subject.pointer_in(buffer)
        subject.recycle = subject.function(address, "buffer.slot.recycle", slots)
        expect(subject.at(address, "buffer.allocated_buffer") == address, "an allocation that is not its own")
        size, nbytes = subject.at(address, "buffer.allocation_size"), subject.at(address, "buffer.byte_length")
        expect(nbytes == buffer.byte_length() and nbytes <= size < nbytes + 4096, f"{nbytes} of {size} bytes")
        offset = subject.at(address, "buffer.byte_offset")
        expect(offset == 0, f"an allocation at byte offset {offset}")
        placed = subject.at(address, "buffer.placement_device")
        expect(placed == 0 or bool(subject.vtable(placed, 1)), "the device of a buffer")
        head = subject.read(address, 104)
        known = (buffer.memory_type(), buffer.allowed_usage(), table["params.access_all"])
        matching = [
            index
            for index, (kind, usage, access) in enumerate(tails)
            if struct.unpack_from("<I", head, kind) + struct.unpack_from("<I", head, usage) == known[:2]
            and struct.unpack_from("<H", head, access)[0] == known[2]
        ]
        expect(matching == [2], f"layouts that fit: {matching or 'none'} of those of 3.0, 3.1 to 3.3, 3.4 and later")


def prove_device(subject: Subject) -> None:
    """Device and allocator, and code in every slot that is used."""
    device = subject.pointer_in(subject.device)
    wrapper = subject.device.allocator
    allocator = subject.allocator = subject.pointer_in(wrapper)
    before = subject.at(allocator, "resource.ref_count", "i")
    another = subject.device.allocator
    expect(subject.pointer_in(another) == allocator, "two allocators of one device")
    during = subject.at(allocator, "resource.ref_count", "i")
    del another
    expect(0 < before == during - 1, f"the allocator's count {before}, {during} with one more wrapper")
    slots, _ = _probe.slots_used()
    numbers = [subject.table[name] for name in subject.table if name.startswith("allocator.slot.")]
    expect(len(set(numbers)) == len(numbers), f"allocator slots {numbers}")
    for name in subject.table:
        if name.startswith("allocator.slot."):
            subject.function(allocator, name, slots)
        if name.startswith("device.slot."):
            subject.function(device, name, 4)


# ---- calls --------------------------------------------------------------------------------------


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


def prove_constants(subject: Subject) -> None:
    """Numbers that go into an import, against the runtime's own enumerations."""
    table = subject.table
    expect(table["params.type_device_local"] == int(rt.MemoryType.DEVICE_LOCAL), "the number of DEVICE_LOCAL")
    expect(table["params.usage_default"] == int(rt.BufferUsage.DEFAULT), "the number of DEFAULT usage")
    expect(table["params.access_all"] == int(rt.MemoryAccess.ALL), "the number of ALL access")
    expect(table["params.queue_affinity_any"] == (1 << 64) - 1, "any queue is all bits")
    host, device = table["external.host_allocation"], table["external.device_allocation"]
    expect(0 < host < device, f"external types {host} and {device}")


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


class _Imported:
    """A known, aligned piece of memory, imported with a counting callback."""

    nbytes = 96

    def __init__(self, subject: Subject, access: int, affinity: int) -> None:
        self.memory = np.zeros(self.nbytes + 64, dtype=np.uint8)
        self.start = -self.memory.ctypes.data % 64
        self.content = self.memory[self.start : self.start + self.nbytes]
        self.content[:] = np.arange(self.nbytes) + 5
        table = subject.table
        self.pointer = self.content.ctypes.data
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
    expect(subject.at(buffer, "resource.ref_count", "i") == 1, "a new buffer's count")
    expect(subject.at(buffer, "buffer.allocated_buffer") == buffer, "an import that is not its own allocation")
    for name, value in (("allocation_size", imported.nbytes), ("byte_offset", 0), ("byte_length", imported.nbytes)):
        found = subject.at(buffer, f"buffer.{name}")
        expect(found == value, f"{name} {found} of an import of {imported.nbytes} bytes")
    access = subject.at(buffer, "buffer.allowed_access", "H")
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
    seen = view.map().asarray(shape, np.dtype(np.float32))
    expect(seen.tobytes() == imported.content.tobytes(), "the bytes of a native view")
    imported.content[17] ^= 0xFF
    expect(seen.tobytes() == imported.content.tobytes(), "a native view does not share memory")
    del seen

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
    aligned = memory.ctypes.data + -memory.ctypes.data % 64
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
    count, held = subject.at(address, "resource.ref_count", "i"), subject.at(allocator, "resource.ref_count", "i")
    expect(count == 1 and held > 1, f"counts {count} and {held} of a device and its allocator")
    _probe.drop(address, destroy)
    left = subject.at(allocator, "resource.ref_count", "i")
    expect(left == held - 1, f"the allocator's count is {left} instead of {held - 1} after its device was destroyed")
    # The devices of one driver share it, so this is not the last reference. For every HAL object
    # but buffers, destroy is the same slot.
    _probe.drop(allocator, destroy_allocator)


READS: tuple[Callable[[Subject], None], ...] = (
    prove_platform,
    prove_instances,
    prove_list,
    prove_variants,
    prove_descriptors,
    prove_value_types,
    prove_views,
    prove_counts,
    prove_buffers,
    prove_device,
    prove_constants,
)
CALLS: tuple[Callable[[Subject], None], ...] = (
    prove_queries,
    prove_host_memory,
    prove_import,
    prove_recycle,
    prove_crossing,
    prove_failures,
    prove_device_calls,
)
