# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Proves, in the running process, every layout that the native path relies on.

Known objects are made through the public API and compared with what their memory shows.
All reading goes through the kernel (``/proc/self/mem``), so that a wrong offset gives an
error instead of a crash. Only then are functions called through vtable slots: on a table
and a runtime release that are known at once, on anything else first in a child process.

The module runs without torch, because the child runs it as a script.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import iree.runtime as rt

if __package__:
    from iree_marshal import _probe
else:  # run as a script, by the child process
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    _suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    _found = Path(__file__).parent / f"_probe{_suffix}"
    _spec = spec_from_file_location("_probe", _found, loader=ExtensionFileLoader("_probe", str(_found)))
    assert _spec is not None and _spec.loader is not None
    _probe = module_from_spec(_spec)
    _spec.loader.exec_module(_probe)

__all__ = ["NEWEST", "OLDEST", "Proof", "Report", "prove", "read_memory", "runtime_version"]

OLDEST, NEWEST = (3, 4, 0), (3, 13, 0)
"""Releases of iree-base-runtime on which all of this was run."""

Table = Mapping[str, int]
_CHILD_SECONDS = 60
_CANARY = 0x1122334455667788
_ALIGNMENT = 64


class Refuted(Exception):
    """A layout is not what the table says."""


@dataclass(frozen=True)
class Proof:
    """One group of layout facts and what was found."""

    name: str
    ok: bool
    detail: str


@dataclass
class Report:
    """What the self-check found.

    Attributes
    ----------
    version : str
        Of iree-base-runtime.
    known : bool
        Whether that release is one of those the layouts were taken from.
    proofs : list of Proof
        In the order they were made; the first one that fails is the last.
    milliseconds : float
        Of this process; a child process is not counted.
    """

    version: str
    known: bool
    proofs: list[Proof] = field(default_factory=list)
    milliseconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything was proven."""
        return bool(self.proofs) and all(proof.ok for proof in self.proofs)

    @property
    def reason(self) -> str:
        """Why not."""
        return "; ".join(f"{proof.name}: {proof.detail}" for proof in self.proofs if not proof.ok)


def runtime_version() -> tuple[str, bool, bool]:
    """Version of iree-base-runtime, whether it is a known release, and whether it is older than those."""
    text = metadata.version("iree-base-runtime")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)$", text)
    if match is None:
        return text, False, False
    version = tuple(int(part) for part in match.groups())
    return text, OLDEST <= version <= NEWEST, version < OLDEST


def read_memory(address: int, nbytes: int) -> bytes:
    """Memory of this process; `OSError` where there is none."""
    if not 0 < address < 2**63:
        raise OSError(f"no memory at {address:#x}")
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        content = os.pread(memory.fileno(), nbytes, address)
    if len(content) != nbytes:
        raise OSError(f"no memory at {address:#x}")
    return content


class _Memory:
    """One open channel to this process's own memory."""

    def __init__(self) -> None:
        self.descriptor = os.open("/proc/self/mem", os.O_RDWR)

    def close(self) -> None:
        os.close(self.descriptor)

    def read(self, address: int, nbytes: int) -> bytes:
        if not 0 < address < 2**63:
            raise OSError(f"no memory at {address:#x}")
        content = os.pread(self.descriptor, nbytes, address)
        if len(content) != nbytes:
            raise OSError(f"no memory at {address:#x}")
        return content

    def write(self, address: int, content: bytes) -> None:
        os.pwrite(self.descriptor, content, address)

    def word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def half(self, address: int) -> int:
        return int.from_bytes(self.read(address, 4), "little")


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Refuted(f"{what} is {found!r}, expected {expected!r}")


class _Check:
    """All proofs on one table; each method proves one group and may rely on those before it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.memory = _Memory()
        # The runtime's mappings: code, and everything (its vtables are data).
        self.code: list[tuple[int, int]] = []
        self.mapped: list[tuple[int, int]] = []

    # ---- what lies where ------------------------------------------------------------

    def platform(self) -> None:
        _expect("the operating system", sys.platform, "linux")
        _expect("the machine", os.uname().machine, "x86_64")
        _expect("the byte order", sys.byteorder, "little")
        _expect("the size of a pointer", struct.calcsize("P"), 8)
        _expect("the interpreter", sys.implementation.name, "cpython")
        # Builds without the GIL have a larger one.
        _expect("the size of a Python object's head", object.__basicsize__, 16)

    def mappings(self) -> None:
        library = sys.modules[rt.VmVariantList.__module__].__file__ or ""
        with open("/proc/self/maps") as maps:
            for line in maps:
                parts = line.rstrip("\n").split(maxsplit=5)
                if len(parts) == 6 and parts[5] == library:
                    start, end = (int(part, 16) for part in parts[0].split("-"))
                    self.mapped.append((start, end))
                    if "x" in parts[1]:
                        self.code.append((start, end))
        if not self.code:
            raise Refuted(f"the code of {Path(library).name} was not found in memory")

    def _is_code(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.code)

    def _is_vtable(self, address: int) -> bool:
        """A vtable of the runtime lies in its own data and starts with code of its own."""
        inside = any(start <= address < end for start, end in self.mapped)
        return inside and address % 8 == 0 and self._is_code(self.memory.word(address))

    # ---- Python objects ---------------------------------------------------------------

    def native(self, instance: object) -> int:
        """The native pointer inside a Python object of iree.runtime."""
        table = self.table
        name = type(instance).__name__
        offset = self.memory.half(id(instance) + table["instance.offset"])
        if not 24 <= offset <= 256 or offset % 8:
            raise Refuted(f"the offset in a {name} is {offset}")
        state = self.memory.half(id(instance) + table["instance.state"])
        _expect(f"the state of a {name}", state & table["instance.state_mask"], table["instance.state_ready"])
        pointer = self.memory.word(id(instance) + offset)
        if pointer == 0 or pointer % 8:
            raise Refuted(f"the pointer in a {name} is {pointer:#x}")
        return pointer

    def objects(self) -> None:
        """Known objects, made through the public API on a device of our own."""
        table = self.table
        # Three bits: two for "ready", one for "stored inside the object".
        _expect("the mask of the state", table["instance.state_mask"], 7)
        self.device = rt.get_driver("local-sync").create_default_device()
        self.allocator = self.device.allocator
        memory_type = rt.MemoryType.DEVICE_LOCAL | rt.MemoryType.HOST_VISIBLE
        usage = rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING
        self.buffer = self.allocator.allocate_buffer(memory_type, usage, 4800)
        self.shapes: list[list[int]] = [[], [9], [4, 3], [2, 3, 5], [2, 3, 5, 7]]
        float32 = int(rt.HalElementType.FLOAT_32)
        self.views = [rt.HalBufferView(self.buffer, shape, float32) for shape in self.shapes]
        self.list = rt.VmVariantList(5)
        uninitialised = rt.VmVariantList.__new__(rt.VmVariantList)
        state = self.memory.half(id(uninitialised) + table["instance.state"])
        if state & table["instance.state_mask"] == table["instance.state_ready"]:
            raise Refuted("an uninitialised object looks initialised")
        for instance in (self.list, self.buffer, *self.views):
            match = re.search(r" at 0x([0-9a-f]+)", repr(instance.ref))
            if match is None:
                raise Refuted(f"no address in {instance.ref!r}")
            _expect(f"the pointer in a {type(instance).__name__}", self.native(instance), int(match.group(1), 16))

    # ---- VM ------------------------------------------------------------------------------

    def lists(self) -> None:
        table, memory = self.table, self.memory
        at = self.native(self.list)
        self.host_allocator = memory.read(at + table["list.host_allocator"], 16)
        self_word, control = struct.unpack("<QQ", self.host_allocator)
        _expect("the first word of the host allocator", self_word, 0)
        if not self._is_code(control):
            raise Refuted("the host allocator of a list is no code of the runtime")
        _expect("the count of an empty list", memory.word(at + table["list.count"]), 0)
        capacity = memory.word(at + table["list.capacity"])
        if not 5 <= capacity <= 4096:
            raise Refuted(f"the capacity of a list made for 5 is {capacity}")
        _expect("the element type of a list", memory.word(at + table["list.element_type"]), 0)
        _expect("the element size of a list", memory.word(at + table["list.element_size"]), table["variant.size"])
        mode = memory.half(at + table["list.storage_mode"])
        _expect("the storage mode of a list", mode, table["list.storage_mode_variant"])
        self.list.push_int(_CANARY)
        self.list.push_float(2.5)
        _expect("the count of a list of 2", memory.word(at + table["list.count"]), 2)
        _expect("the capacity of a list of 2", memory.word(at + table["list.capacity"]), capacity)

    def _variant(self, index: int) -> int:
        storage = self.memory.word(self.native(self.list) + self.table["list.storage"])
        return storage + index * self.table["variant.size"]

    def variants(self) -> None:
        table, memory = self.table, self.memory
        first, second = self._variant(0), self._variant(1)
        _expect("the type of an integer", memory.word(first + table["variant.type"]), table["value_type.i64"])
        _expect("the value of an integer", memory.word(first + table["variant.value"]), _CANARY)
        _expect("the type of a float", memory.word(second + table["variant.type"]), table["value_type.f64"])
        value = struct.unpack("<d", memory.read(second + table["variant.value"], 8))[0]
        _expect("the value of a float", value, 2.5)
        _expect("an entry beyond the count", memory.read(self._variant(2), table["variant.size"]), bytes(24))
        self.list.push_ref(self.views[2])
        self.list.push_ref(self.buffer)
        self.list.push_list(rt.VmVariantList(1))
        for index, name, instance in ((2, "hal.buffer_view", self.views[2]), (3, "hal.buffer", self.buffer)):
            self._reference(index, name)
            value = memory.word(self._variant(index) + table["variant.value"])
            _expect(f"the pointer of a {name}", value, self.native(instance))
        self._reference(4, "vm.list")

    def _reference(self, index: int, name: str) -> None:
        table, memory = self.table, self.memory
        at = self._variant(index)
        word = memory.word(at + table["variant.type"])
        _expect(f"the second type word of a {name}", memory.word(at + table["variant.ref_type"]), word)
        _expect(f"the low bits of the type of a {name}", word & 7, 0)
        length = memory.word(word + table["descriptor.name_length"])
        _expect(f"the length of the name of a {name}", length, len(name))
        found = memory.read(memory.word(word + table["descriptor.name"]), length)
        _expect("the name of a type", found, name.encode())
        if not self._is_code(memory.word(word + table["descriptor.destroy"])):
            raise Refuted(f"the destructor of a {name} is no code of the runtime")
        bits = memory.word(word + table["descriptor.count_offset_bits"]) & 7
        _expect(f"the place of the count of a {name}", bits, 0)

    # ---- HAL --------------------------------------------------------------------------------

    def buffer_views(self) -> None:
        table, memory = self.table, self.memory
        float32 = int(rt.HalElementType.FLOAT_32)
        for view, shape in zip(self.views, self.shapes, strict=True):
            at = self.native(view)
            words = memory.read(at + table["view.host_allocator"], 16)
            _expect("the host allocator of a view", words, self.host_allocator)
            _expect("the buffer of a view", memory.word(at + table["view.buffer"]), self.native(self.buffer))
            _expect("the element type of a view", memory.half(at + table["view.element_type"]), float32)
            encoding = memory.half(at + table["view.encoding_type"])
            _expect("the encoding of a view", encoding, table["view.encoding_dense"])
            _expect("the byte length of a view", memory.word(at + table["view.byte_length"]), view.byte_length)
            _expect("the rank of a view", memory.word(at + table["view.rank"]), len(shape))
            dims = [memory.word(at + table["view.dims"] + 8 * dim) for dim in range(len(shape))]
            _expect("the shape of a view", dims, shape)

    def reference_counts(self) -> None:
        for instance in (self.list, self.views[3], self.buffer):
            at = self.native(instance)
            before = self.memory.half(at)
            held = instance.ref
            _expect(f"the count of a {type(instance).__name__} held twice", self.memory.half(at), before + 1)
            del held
            _expect(f"the count of a {type(instance).__name__}", self.memory.half(at), before)

    def buffers(self) -> None:
        table, memory = self.table, self.memory
        at = self.native(self.buffer)
        _expect("the allocated buffer", memory.word(at + table["buffer.allocated_buffer"]), at)
        # Each size is changed for a moment; the public text must show it.
        for name, pattern in (
            ("byte_length", r"<HalBuffer (\d+) bytes"),
            ("byte_offset", r"at offset (\d+) into"),
            ("allocation_size", r"into (\d+)\)"),
        ):
            place = at + table[f"buffer.{name}"]
            original = memory.word(place)
            _expect(f"the {name} of a buffer", original, 0 if name == "byte_offset" else 4800)
            memory.write(place, (4816).to_bytes(8, "little"))
            try:
                shown = re.search(pattern, repr(self.buffer))
            finally:
                memory.write(place, original.to_bytes(8, "little"))
            _expect(f"the {name} that a changed buffer shows", shown and shown.group(1), "4816")
        memory_type = memory.half(at + table["buffer.memory_type"])
        _expect("the memory type of a buffer", memory_type, int(self.buffer.memory_type()))
        usage = memory.half(at + table["buffer.allowed_usage"])
        _expect("the usage of a buffer", usage, int(self.buffer.allowed_usage()))
        access = memory.half(at + table["buffer.allowed_access"]) & 0xFFFF
        _expect("the access of a buffer", access, 7)
        self._vtable("buffer", at, table["buffer.slots"], 6)

    def _vtable(self, name: str, at: int, slots: int, expected_slots: int) -> int:
        vtable = self.memory.word(at + self.table["resource.vtable"])
        _expect(f"the number of slots of a {name} that are looked at", slots, expected_slots)
        if not self._is_vtable(vtable):
            raise Refuted(f"the vtable of a {name} is none of the runtime's")
        for slot in range(slots):
            if not self._is_code(self.memory.word(vtable + 8 * slot)):
                raise Refuted(f"slot {slot} of the vtable of a {name} is no code of the runtime")
        return vtable

    def devices(self) -> None:
        memory = self.memory
        at = self.native(self.allocator)
        before = memory.half(at)
        second = self.device.allocator
        _expect("the pointer of a second allocator object", self.native(second), at)
        _expect("the count of an allocator held twice", memory.half(at), before + 1)
        del second
        _expect("the count of an allocator", memory.half(at), before)
        self.allocator_vtable = self._vtable("allocator", at, self.table["allocator.slots"], 10)
        self.device_vtable = self._vtable("device", self.native(self.device), 4, 4)
        _expect("the slot of a device's destructor", self.table["device.slot.destroy"], 0)

    # ---- calls -------------------------------------------------------------------------------

    def calls(self) -> None:
        """Functions through their slots; everything they are given was proven above."""
        table = self.table
        device, allocator = self.native(self.device), self.native(self.allocator)
        found = _probe.device_allocator(self.device_vtable, table["device.slot.device_allocator"], device)
        _expect("the allocator that the device returns", found, allocator)
        words = _probe.host_allocator(self.allocator_vtable, table["allocator.slot.host_allocator"], allocator)
        _expect("the host allocator that the allocator returns", struct.pack("<QQ", *words), self.host_allocator)
        for usage, memory_type, size in ((0xC03, 0x30, 64), (0x3, 0x46, 4096), (0x1000C03, 0x32, 0)):
            public = int(
                self.allocator.query_buffer_compatibility(
                    memory_type=memory_type, allowed_usage=usage, intended_usage=usage, allocation_size=size
                )
            )
            slot = table["allocator.slot.query_compatibility"]
            params = self._params(usage, memory_type)
            _expect(
                "the compatibility of a buffer",
                _probe.query_compatibility(self.allocator_vtable, slot, allocator, params, size),
                public,
            )

    def _params(self, usage: int, memory_type: int) -> bytearray:
        table = self.table
        params = bytearray(64)
        struct.pack_into("<Q", params, table["params.queue_affinity"], 2**64 - 1)
        struct.pack_into("<I", params, table["params.usage"], usage)
        struct.pack_into("<H", params, table["params.access"], 7)
        struct.pack_into("<I", params, table["params.type"], memory_type)
        return params

    def _external(self, kind: int, size: int, handle: int) -> bytearray:
        table = self.table
        external = bytearray(64)
        struct.pack_into("<i", external, table["external.type"], kind)
        struct.pack_into("<Q", external, table["external.size"], size)
        struct.pack_into("<Q", external, table["external.handle"], handle)
        return external

    def crossing(self) -> None:
        """One buffer in through `import_buffer`, read back through the public API, out through `export_buffer`."""
        table, memory = self.table, self.memory
        allocator = self.native(self.allocator)
        backing = bytearray(48 + _ALIGNMENT)
        start = ctypes.addressof(ctypes.c_char.from_buffer(backing))
        skip = -start % _ALIGNMENT
        backing[skip : skip + 48] = bytes(range(48))
        callbacks, frees = _probe.counts()
        slot = table["allocator.slot.import_buffer"]
        external = self._external(table["external.device_allocation"], 48, start + skip)
        status, buffer = _probe.import_buffer(
            self.allocator_vtable, slot, allocator, self._params(0xC03, 0x30), external
        )
        _expect("the status of an import", status, 0)
        _expect("the length of an imported buffer", memory.word(buffer + table["buffer.byte_length"]), 48)
        _expect("the access of an imported buffer", memory.half(buffer + table["buffer.allowed_access"]) & 0xFFFF, 7)
        # The device of a host import is unknown, its queue affinity "any": that is where the placement lies.
        placement = memory.read(buffer + table["buffer.placement_device"], 16)
        _expect("the placement of an imported buffer", placement, bytes(8) + b"\xff" * 8)
        size = 8 * 2 + table["view.dims"]
        content = bytearray(size)
        struct.pack_into("<i", content, 0, 1)
        struct.pack_into("<QQ", content, table["view.host_allocator"], *_probe.view_allocator())
        struct.pack_into("<Q", content, table["view.buffer"], buffer)
        struct.pack_into("<I", content, table["view.element_type"], int(rt.HalElementType.FLOAT_32))
        struct.pack_into("<I", content, table["view.encoding_type"], table["view.encoding_dense"])
        struct.pack_into("<Q", content, table["view.byte_length"], 48)
        struct.pack_into("<Q", content, table["view.rank"], 2)
        struct.pack_into("<qq", content, table["view.dims"], 4, 3)
        view = _probe.allocate(bytes(content))
        type_word = memory.word(self._variant(2) + table["variant.type"])
        variants = rt.VmVariantList(1)
        at = self.native(variants)
        entry = bytearray(table["variant.size"])
        struct.pack_into("<Q", entry, table["variant.type"], type_word)
        struct.pack_into("<Q", entry, table["variant.value"], view)
        struct.pack_into("<Q", entry, table["variant.ref_type"], type_word)
        memory.write(memory.word(at + table["list.storage"]), bytes(entry))
        memory.write(at + table["list.count"], (1).to_bytes(8, "little"))
        public = variants.get_as_object(0, rt.HalBufferView)
        _expect("the shape that an imported view shows", list(public.shape), [4, 3])
        _expect("the byte length that an imported view shows", public.byte_length, 48)
        shown = bytes(memoryview(public.map()).cast("B")) if hasattr(public, "map") else b""
        _expect("the bytes of an imported view", shown[:48], bytes(range(48)))
        slot = table["allocator.slot.export_buffer"]
        status, out = _probe.export_buffer(
            self.allocator_vtable, slot, allocator, buffer, table["external.device_allocation"]
        )
        _expect("the status of an export", status, 0)
        _expect("the pointer of an export", struct.unpack_from("<Q", out, table["external.handle"])[0], start + skip)
        del shown, public
        _expect("callbacks while the list lives", _probe.counts(), (callbacks, frees))
        del variants
        _expect("callbacks and frees once the list is gone", _probe.counts(), (callbacks + 1, frees + 1))

    def statuses(self) -> None:
        """A refused import must give its code and a readable message, and no callback."""
        table, memory = self.table, self.memory
        before = _probe.counts()
        slot = table["allocator.slot.import_buffer"]
        status, buffer = _probe.import_buffer(
            self.allocator_vtable, slot, self.native(self.allocator), self._params(0xC03, 0x30), self._external(0, 64, 64)
        )
        _expect("the code of a refused import", status & table["status.code_mask"], 14)
        _expect("the buffer of a refused import", buffer, 0)
        _expect("callbacks of a refused import", _probe.counts(), before)
        storage = status & ~31
        if storage:
            length = memory.word(storage + table["status.message_length"])
            if not 0 < length < 4096:
                raise Refuted(f"the message of a status is {length} bytes long")
            text = memory.read(memory.word(storage + table["status.message"]), length)
            if not text.decode("utf-8", "replace").isprintable():
                raise Refuted("the message of a status is not readable")
            _expect("the payload of a status", memory.word(storage + table["status.payload_head"]), 0)
            _probe.free_status(storage)
        _expect("the mask of a status code", table["status.code_mask"], 31)


_READING = (
    "platform", "mappings", "objects", "lists", "variants", "buffer_views", "reference_counts", "buffers", "devices",
)
_CALLING = ("calls", "crossing", "statuses")


def prove(table: Table | None = None, *, in_child: bool = False) -> Report:
    """Run the self-check.

    Parameters
    ----------
    table : mapping, optional
        Layouts to prove, as `_probe.layout_table` gives them; by default those.
    in_child : bool
        This is the child process: the calls are made here whatever the table is.

    Returns
    -------
    Report
        It stops at the first proof that fails.
    """
    text, known, older = runtime_version()
    report = Report(text, known)
    built_in = _probe.layout_table()
    if older:
        report.proofs.append(Proof("release", False, f"iree-base-runtime {text} is older than {_dotted(OLDEST)}"))
        return report
    table = built_in if table is None else dict(table)
    started = time.perf_counter()
    check = _Check(table)
    try:
        steps: list[tuple[str, Callable[[], None]]] = [(name, getattr(check, name)) for name in _READING]
        if not (known and table == built_in) and not in_child:
            steps.append(("child process", lambda: _prove_in_child(table)))
        steps += [(name, getattr(check, name)) for name in _CALLING]
        for name, step in steps:
            before = time.perf_counter()
            try:
                step()
            except (Refuted, OSError, struct.error, IndexError, OverflowError) as error:
                report.proofs.append(Proof(name.replace("_", " "), False, str(error)))
                break
            if name == "child process":
                started += time.perf_counter() - before
            report.proofs.append(Proof(name.replace("_", " "), True, "as expected"))
    finally:
        check.memory.close()
    report.milliseconds = (time.perf_counter() - started) * 1e3
    return report


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _prove_in_child(table: Table) -> None:
    """Make the calls where a crash costs nothing."""
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(dict(table)),
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refuted(f"the child process did not end within {_CHILD_SECONDS} s") from None
    if done.returncode < 0:
        raise Refuted(f"the child process died of signal {-done.returncode}")
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()
        raise Refuted(f"in the child process: {lines[-1] if lines else done.stderr.strip()[-200:]}")


def _main() -> int:
    instance = rt.VmInstance()
    report = prove(json.load(sys.stdin), in_child=True)
    if not report.ok:
        print(report.reason, flush=True)
    del instance
    # What a wrong table left behind must not be taken apart.
    os._exit(0 if report.ok else 1)


if __name__ == "__main__":
    _main()
