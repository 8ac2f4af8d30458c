# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the self-check proves by reading known objects.

Objects are made through the public API of iree.runtime, so that what their memory must
hold is known. A step relies on those before it. Nothing is called through a table here:
`iree_marshal.proofs_by_call` does that, after every read has been proven. Does not
import torch.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable

import iree.runtime as rt

from iree_marshal import _probe
from iree_marshal.subject import OFFSET_KINDS, SHAPES, Refused, Subject, expect, ref_address

__all__ = ["READS"]

_CANARY = 0x1122334455667788
_FLOAT_CANARY = -2.718281828459045

_NO_OFFSETS = {
    "py_instance.state_mask",
    "py_instance.state_ready",
    "list.storage_mode_variant",
    "host_allocator.malloc",
    "host_allocator.free",
    "variant.size",
    "view.encoding_dense",
    "params.usage_default",
    "params.access_all",
    "params.type_device_local",
    "params.queue_affinity_any",
    "external.host_allocation",
    "external.device_allocation",
    "status.code_mask",
}
_OFFSETS = tuple(
    name
    for name in _probe.layout_table()
    if name not in _NO_OFFSETS and ".slot." not in name and not name.startswith("value_type.")
)


def prove_platform(subject: Subject) -> None:
    """Linux x86-64 and a CPython with a GIL."""
    machine = os.uname()
    expect(sys.platform == "linux" and machine.machine == "x86_64", f"{sys.platform} {machine.machine}")
    expect(sys.byteorder == "little" and struct.calcsize("P") == 8, "not 64-bit little endian")
    expect(sys.implementation.name == "cpython", f"{sys.implementation.name} instead of CPython")
    expect("t" not in sys.abiflags, "a CPython build without the GIL")
    expect(object.__basicsize__ == 16, f"an object header of {object.__basicsize__} bytes")
    expect(bool(subject.code), "no executable mapping of the runtime library")


def prove_alignment(subject: Subject) -> None:
    """Every offset is a multiple of its field's size."""
    for name in _OFFSETS:
        width = struct.calcsize(OFFSET_KINDS.get(name, "Q"))
        offset = subject.table[name]
        expect(0 <= offset < 4096 and offset % width == 0, f"{name}: {offset} is no offset of a field of {width} bytes")


def prove_instances(subject: Subject) -> None:
    """The native pointer inside a Python object is the address that its `.ref` prints."""
    table = subject.table
    # Uninitialised, relinquished and indirect instances differ from READY in these three bits.
    expect(table["py_instance.state_mask"] & 7 == 7, "the mask leaves a state bit out")
    view = subject.views[2]
    for instance in (subject.variants, view, view.get_buffer()):
        pointer = subject.pointer_in(instance)
        expect(
            pointer == ref_address(instance),
            f"{type(instance).__name__}: found {pointer:#x}, its reference says {ref_address(instance):#x}",
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
    mode = subject.at(address, "list.storage_mode")
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
        expect(subject.at(address, "variant.value") == value % (1 << 64), "the value of an integer")
    expect(subject.at(real, "variant.type") == table["value_type.f64"], "the type of a float")
    content = subject.read(real + table["variant.value"], 8)
    expect(content == struct.pack("<d", _FLOAT_CANARY), "the value of a float")
    for index, pointer in ((2, ref_address(view)), (3, ref_address(view.get_buffer()))):
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
    for view, shape in zip(subject.views, SHAPES, strict=True):
        address = subject.pointer_in(view)
        rank = subject.at(address, "view.rank")
        expect(rank == len(shape) == len(view.shape), f"rank {rank} of {shape}")
        dims = struct.unpack(f"<{rank}q", subject.read(address + table["view.dims"], 8 * rank))
        expect(dims == shape == tuple(view.shape), f"sizes {dims} of {shape}")
        element_type = subject.at(address, "view.element_type")
        expect(element_type == int(view.element_type), f"element type {element_type:#x}")
        encoding = subject.at(address, "view.encoding_type")
        expect(encoding == table["view.encoding_dense"], f"encoding {encoding}")
        nbytes = subject.at(address, "view.byte_length")
        expect(nbytes == view.byte_length == view.get_buffer().byte_length(), f"length {nbytes}")
        buffer = subject.at(address, "view.buffer")
        expect(buffer == ref_address(view.get_buffer()), f"buffer at {buffer:#x}")
        words = subject.host_pair(address, "view.host_allocator")
        expect(words == subject.host_words, "the host allocator differs from the list's")


def prove_counts(subject: Subject) -> None:
    """A reference count rises by exactly one while a reference lives."""
    view = subject.views[1]
    buffer = view.get_buffer()
    for instance, name in ((subject.variants, "list"), (view, "view"), (buffer, "resource")):
        address = subject.pointer_in(instance)
        before = subject.at(address, f"{name}.ref_count")
        reference = instance.ref
        during = subject.at(address, f"{name}.ref_count")
        del reference
        after = subject.at(address, f"{name}.ref_count")
        expect(
            0 < before == after == during - 1,
            f"{type(instance).__name__}: count {before}, {during} with one more reference, then {after}",
        )


def prove_buffers(subject: Subject) -> None:
    """The head of a buffer, and which releases' layout it has."""
    table = subject.table
    tails = (
        *_probe.older_tails(),
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
    before = subject.at(allocator, "resource.ref_count")
    another = subject.device.allocator
    expect(subject.pointer_in(another) == allocator, "two allocators of one device")
    during = subject.at(allocator, "resource.ref_count")
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


def prove_constants(subject: Subject) -> None:
    """Numbers that go into an import, against the runtime's own enumerations."""
    table = subject.table
    expect(table["params.type_device_local"] == int(rt.MemoryType.DEVICE_LOCAL), "the number of DEVICE_LOCAL")
    expect(table["params.usage_default"] == int(rt.BufferUsage.DEFAULT), "the number of DEFAULT usage")
    expect(table["params.access_all"] == int(rt.MemoryAccess.ALL), "the number of ALL access")
    expect(table["params.queue_affinity_any"] == (1 << 64) - 1, "any queue is all bits")
    host, device = table["external.host_allocation"], table["external.device_allocation"]
    expect(0 < host < device, f"external types {host} and {device}")


READS: tuple[Callable[[Subject], None], ...] = (
    prove_platform,
    prove_alignment,
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
