# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The cases that need no compiled program: torch's floor, the way in, the way out of imported memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import iree.runtime as rt
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from iree_marshal import devices, marshal, portable
from iree_marshal.bench.harness import UNIT, Case, Derived

__all__ = [
    "SHAPE",
    "TENSORS",
    "Fixture",
    "core_cases",
    "core_derived",
    "dlpack_device",
    "export_cases",
    "stock_export",
    "stock_import",
]

TENSORS = 400
SIZES = (1, 10, 100, 400, 1000, 10_000)
SHAPE = (64, 64)


class Fixture:
    """What the cases of one run share.

    Parameters
    ----------
    device : str or torch.device
        Where the tensors are.
    quick : bool
        Leave the longest lists and the largest programs out.
    """

    def __init__(self, device: str | torch.device = "cpu", *, quick: bool = False) -> None:
        self.hal = devices.hal_device(torch.device(device))
        self.torch = devices.torch_device_of(self.hal)
        self.cuda = self.torch.type != "cpu"
        self.quick = quick
        self.sizes = tuple(size for size in SIZES if size <= TENSORS) if quick else SIZES
        self._pool: list[torch.Tensor] = []

    def inline(self) -> Fixture:
        """Return the same tensors with a device that works on the calling thread, where IREE has one.

        Handing work to another thread takes a time that varies by more than a tensor costs.
        """
        other = copy.copy(self)
        if not self.cuda:
            other.hal = rt.get_device("local-sync")
        return other

    def tensors(self, count: int = TENSORS) -> list[torch.Tensor]:
        """Return the first `count` tensors of one pool, so that long lists share memory with short ones."""
        self._pool += self.fresh(count - len(self._pool))
        return self._pool[:count]

    def fresh(self, count: int) -> list[torch.Tensor]:
        """Make `count` tensors."""
        return [torch.randn(SHAPE, device=self.torch) for _ in range(count)]

    def synchronize(self) -> None:
        """Wait for torch's device, where it has a queue."""
        if self.cuda:
            torch.cuda.synchronize(self.torch)


def detach(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detach every tensor, the list kept."""
    return [tensor.detach() for tensor in tensors]


def floor_cases(fixture: Fixture) -> Iterator[Case]:
    """Time what torch itself asks for."""
    tensors = fixture.tensors()
    yield Case(UNIT, "torch floor: `[t.detach() for t in ts]`, the unit", lambda: [t.detach() for t in tensors])
    yield Case("floor.to_dlpack", "torch floor: `to_dlpack(t)`", lambda: [to_dlpack(t) for t in tensors])
    yield Case(
        "floor.dlpack_round_trip",
        "torch floor: `from_dlpack(to_dlpack(t))`",
        lambda: [from_dlpack(to_dlpack(t)) for t in tensors],
    )
    for size in fixture.sizes:
        some = fixture.tensors(size)
        yield Case(f"scaling.detach.{size}", f"`detach` of {size}", partial(detach, some), size)


def stock_import(device: rt.HalDevice, tensors: Sequence[torch.Tensor], capsule: Callable[[Any], Any]) -> object:
    """Import the stock way: one capsule, one buffer view and one push per tensor."""
    variants = rt.VmVariantList(len(tensors))
    for tensor in tensors:
        variants.push_ref(device.from_dlpack_capsule(capsule(tensor)))
    return variants


def stock_copy_import(device: rt.HalDevice, tensors: Sequence[torch.Tensor]) -> object:
    """Import the stock way of those who go through numpy."""
    variants = rt.VmVariantList(len(tensors))
    for tensor in tensors:
        variants.push_ref(rt.asdevicearray(device, tensor.cpu().numpy())._buffer_view)
    return variants


def import_cases(fixture: Fixture) -> Iterator[Case]:
    """Time tensors into a new list, and the list dropped."""
    hal, device, tensors = fixture.hal, fixture.torch, fixture.tensors()
    yield Case("import.ours", "`to_variant_list(ts)`", lambda: marshal.to_variant_list(tensors))
    yield Case(
        "import.ours.device",
        "`to_variant_list(ts, device=...)`",
        lambda: marshal.to_variant_list(tensors, device=device),
    )
    yield Case(
        "import.portable",
        "portable path of `to_variant_list`",
        lambda: portable.to_variant_list(tensors, hal, device, None, True, False),
    )
    yield Case(
        "import.stock.to_dlpack",
        "stock: `to_dlpack`, `from_dlpack_capsule`, `push_ref`",
        lambda: stock_import(hal, tensors, to_dlpack),
        optional=True,
    )
    yield Case(
        "import.stock.dunder",
        "stock: `__dlpack__`, `from_dlpack_capsule`, `push_ref`",
        lambda: stock_import(hal, tensors, torch.Tensor.__dlpack__),
        optional=True,
    )
    yield Case(
        "import.stock.copy",
        "stock: `asdevicearray(t.numpy())`",
        lambda: stock_copy_import(hal, tensors),
        unlike="copies the data",
        optional=True,
    )
    for size in fixture.sizes:
        some = fixture.tensors(size)
        yield Case(
            f"scaling.import.{size}",
            f"`to_variant_list` of {size}",
            partial(marshal.to_variant_list, some),
            size,
        )
        yield Case(
            f"scaling.import.stock.{size}",
            f"stock import of {size}, `to_dlpack`",
            partial(stock_import, hal, some, to_dlpack),
            size,
            optional=True,
        )


def dlpack_device(device: torch.device) -> tuple[int, int]:
    """Return DLPack's numbers for a device, which the stock bindings ask for."""
    return {"cpu": 1, "cuda": 2}[device.type], device.index or 0


def stock_export(device: rt.HalDevice, variants: rt.VmVariantList, kind: int, index: int) -> list[torch.Tensor]:
    """Export the stock way: one object, one capsule and one tensor per result."""
    results = []
    for position in range(len(variants)):
        view = variants.get_as_object(position, rt.HalBufferView)
        results.append(torch.from_dlpack(device.create_dlpack_capsule(view, kind, index)))
    return results


def stock_copy_export(device: rt.HalDevice, variants: rt.VmVariantList) -> list[torch.Tensor]:
    """Export the stock way of those who go through numpy."""
    results = []
    for position in range(len(variants)):
        view = variants.get_as_object(position, rt.HalBufferView)
        results.append(torch.from_numpy(rt.DeviceArray(device, view, implicit_host_transfer=True).to_host()))
    return results


def export_cases(
    fixture: Fixture, variants: rt.VmVariantList, name: str, what: str, unlike: str = ""
) -> Iterator[Case]:
    """Time the buffer views of one list to torch, and the tensors dropped.

    Parameters
    ----------
    fixture : Fixture
        The devices.
    variants : iree.runtime.VmVariantList
        Buffer views.
    name : str
        What the names of the cases begin with.
    what : str
        What the buffers are, for the table.
    unlike : str
        As in `Case`.
    """
    hal, count = fixture.hal, len(variants)
    kind, index = dlpack_device(fixture.torch)
    yield Case(
        f"{name}.ours",
        f"`from_variant_list`, {what}",
        lambda: marshal.from_variant_list(variants),
        count,
        unlike=unlike,
    )
    yield Case(
        f"{name}.portable",
        f"portable path of `from_variant_list`, {what}",
        lambda: portable.from_variant_list(variants, hal, False),
        count,
        unlike=unlike or ("copies the data" if fixture.cuda else ""),
    )
    yield Case(
        f"{name}.stock",
        f"stock: `get_as_object`, `create_dlpack_capsule`, `torch.from_dlpack`, {what}",
        lambda: stock_export(hal, variants, kind, index),
        count,
        unlike=unlike,
        optional=True,
    )
    yield Case(
        f"{name}.stock.copy",
        f"stock: `to_host`, `torch.from_numpy`, {what}",
        lambda: stock_copy_export(hal, variants),
        count,
        unlike="copies the data",
        optional=True,
    )


def core_cases(fixture: Fixture) -> Iterator[Case]:
    """Yield every case that needs no compiled program."""
    yield from floor_cases(fixture)
    yield from import_cases(fixture)
    imported = marshal.to_variant_list(fixture.tensors())
    kind, index = dlpack_device(fixture.torch)
    yield from export_cases(fixture, imported, "export.imported", "imported memory", "not results of a program")
    for size in fixture.sizes:
        some = marshal.to_variant_list(fixture.tensors(size))
        yield Case(
            f"scaling.export.{size}",
            f"`from_variant_list` of {size}, imported memory",
            partial(marshal.from_variant_list, some),
            size,
        )
        yield Case(
            f"scaling.export.stock.{size}",
            f"stock export of {size}, `torch.from_dlpack`, imported memory",
            partial(stock_export, fixture.hal, some, kind, index),
            size,
            optional=True,
        )


def flatness(way: str, size: int) -> Derived:
    """Derive how much more a tensor costs in a list of `size` than in one of a hundred."""
    long, short = f"scaling.{way}.{size}", f"scaling.{way}.100"
    title = f"cost per tensor, {size} over 100: {way}"
    return Derived(f"flat.{way}.{size}", title, lambda one: (one[long] / size) / (one[short] / 100), "x")


def core_derived(fixture: Fixture) -> Iterator[Derived]:
    """Yield figures over the core cases."""
    for way in ("import", "export", "import.stock", "export.stock", "detach"):
        yield from (flatness(way, size) for size in fixture.sizes if size > 100)
    yield Derived(
        "speedup.import",
        "stock `to_dlpack` import over ours",
        lambda one: one["import.stock.to_dlpack"] / one["import.ours"],
        "x",
    )
