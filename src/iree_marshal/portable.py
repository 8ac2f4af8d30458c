# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The portable path: the same crossing on public calls of iree.runtime alone.

Slower, but right on any runtime: it is used where the native path is not proven, and as
the oracle of the tests. It differs in two points: CUDA results are copied (stock IREE
cannot export stream-ordered allocations), and CUDA is ordered by host synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import iree.runtime as rt
import numpy as np
import torch
from torch.utils import dlpack

from iree_marshal import devices, values
from iree_marshal.arrays import HalArray
from iree_marshal.element_types import HAL_OF, TORCH_OF
from iree_marshal.errors import where

__all__ = ["from_variant_list", "order", "record_stream", "to_variant_list"]

_BYTE = HAL_OF[torch.uint8]
_DLPACK_CPU = 1


def to_variant_list(
    sequence: Sequence[Any],
    hal_device: rt.HalDevice | None,
    torch_device: torch.device | None,
    copy: bool | None,
    order: bool,
    upload: bool,
) -> rt.VmVariantList:
    """The portable path of `iree_marshal.to_variant_list`; the arguments are resolved there."""
    devices.check_not_forked()
    devices.vm_instance()
    call = _Import(hal_device, torch_device, copy, upload)
    variants = call.convert(sequence, ())
    if order and call.torch_device is not None:
        _synchronize(call.torch_device)
    return variants


def order(hal_device: rt.HalDevice) -> None:
    """Wait for torch's current stream on the host: the public API names no stream of IREE's."""
    _synchronize(devices.torch_device_of(hal_device))


def record_stream(hal_device: rt.HalDevice, stream: int) -> None:
    """Nothing to do: results on a GPU are copies in memory of torch's, which has its own `record_stream`."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Import:
    """One call: what all of its elements share."""

    def __init__(
        self, hal_device: rt.HalDevice | None, torch_device: torch.device | None, copy: bool | None, upload: bool
    ) -> None:
        self.hal_device = hal_device
        self.torch_device = torch_device
        self.copy = copy
        self.upload = upload

    def convert(self, sequence: Sequence[Any], path: tuple[int, ...]) -> rt.VmVariantList:
        count = len(sequence)
        variants = rt.VmVariantList(max(count, 1))
        for index in range(count):
            # Admitting an element may run Python code that changes a list.
            if index >= len(sequence):
                raise RuntimeError(f"{where(path)}: the list changed its length while it was converted")
            inner = (*path, index)
            kind, payload = values.admit(sequence[index], inner, self.torch_device, self.copy, self.upload)
            if kind == values.TENSOR:
                if self.hal_device is None:
                    self.torch_device = payload.device
                    self.hal_device = devices.hal_device(payload.device)
                variants.push_ref(_import(self.hal_device, payload))
            elif kind == values.INT:
                variants.push_int(payload)
            elif kind == values.FLOAT:
                variants.push_float(payload)
            elif kind == values.NONE:
                variants.push_ref(_null_reference(inner))
            elif kind == values.LIST:
                variants.push_list(self.convert(payload, inner))
            elif kind == values.VARIANTS:
                variants.push_list(payload)
            else:
                variants.push_ref(payload)
        return variants


# One line of the alignment that IREE asks of host memory.
_STAND_IN_BYTES = 64

_null: rt.VmRef | None = None


def _null_reference(path: tuple[int, ...]) -> rt.VmRef:
    """A reference to nothing. No public call makes one, but it can be had from IREE's own HAL module.

    That hands out a null device for an ordinal beyond the last one, and a module written in
    Python is given its arguments as references, null ones included.
    """
    global _null
    if _null is None:
        taken: list[rt.VmRef] = []
        try:
            instance = devices.vm_instance()
            source = rt.create_hal_module(instance, devices.hal_device("cpu"))
            interface = rt.PyModuleInterface("iree_marshal", lambda interface: None)
            interface.export("take", "0r_v", lambda state, reference: taken.append(reference))
            sink = interface.create()
            context = rt.VmContext(instance, modules=[source, sink])
            ordinal, nothing = rt.VmVariantList(1), rt.VmVariantList(1)
            ordinal.push_int(2**31)
            context.invoke(source.lookup_function("devices.get"), ordinal, nothing)
            context.invoke(sink.lookup_function("take"), nothing, rt.VmVariantList(1))
            _null = taken[0]
        except Exception as error:
            raise NotImplementedError(
                f"{where(path)}: None needs the native path: iree.runtime has no public call for a null reference"
            ) from error
    return _null


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a compact tensor as a flat tensor of bytes; of an empty one, a few bytes that nobody reads."""
    if tensor.numel() == 0:
        # local-task crashes in a dispatch over a buffer of no bytes at all (3.4.0 to 3.13.0).
        return torch.empty(_STAND_IN_BYTES, dtype=torch.uint8, device=tensor.device)
    # Said anew: dimensions of size 0 and 1 may have strides that forbid another look at the bytes.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def _import(hal_device: rt.HalDevice, tensor: torch.Tensor) -> rt.HalBufferView:
    """A buffer view on the tensor's memory, which IREE keeps alive through DLPack's deleter.

    The bytes cross, and the view says what they mean: IREE's DLPack import knows neither
    float8 nor the strides torch gives to empty tensors.
    """
    with values.as_stored():
        raw = hal_device.from_dlpack_capsule(dlpack.to_dlpack(_bytes_of(tensor)))
    return rt.HalBufferView(raw.get_buffer(), list(tensor.shape), HAL_OF[tensor.dtype])


def from_variant_list(variants: rt.VmVariantList, hal_device: rt.HalDevice | None, as_arrays: bool) -> list[Any]:
    """The portable path of `iree_marshal.from_variant_list`; the arguments are resolved there."""
    devices.check_not_forked()
    devices.vm_instance()
    return _convert(variants, hal_device, as_arrays, ())


def _convert(
    variants: rt.VmVariantList, hal_device: rt.HalDevice | None, as_arrays: bool, path: tuple[int, ...]
) -> list[Any]:
    results: list[Any] = []
    for index in range(len(variants)):
        value = variants.get_variant(index)
        if not isinstance(value, rt.VmRef):
            results.append(value)
        elif value.isinstance(rt.HalBufferView):
            inner = (*path, index)
            tensor = _export(hal_device, value.deref(rt.HalBufferView), inner)
            results.append(tensor_as_array(tensor) if as_arrays else tensor)
        elif value.isinstance(rt.VmVariantList):
            inner = (*path, index)
            values.check_depth(inner)
            results.append(_convert(variants.get_as_list(index), hal_device, as_arrays, inner))
        else:
            results.append(as_runtime_object(value))
    return results


def as_runtime_object(reference: rt.VmRef) -> Any:
    """The object of iree.runtime that a reference leads to; the reference itself for other types."""
    for cls in (rt.HalBuffer, rt.HalFence):
        if reference.isinstance(cls):
            return reference.deref(cls)
    return reference


def _export(hal_device: rt.HalDevice | None, view: rt.HalBufferView, path: tuple[int, ...]) -> torch.Tensor:
    """The view's memory as a tensor: shared on the host, copied from a GPU."""
    dtype = TORCH_OF.get(int(view.element_type))
    if dtype is None:
        raise TypeError(f"{where(path)}: torch has no dtype for the HAL element type {int(view.element_type):#010x}")
    buffer = view.get_buffer()
    host_visible = bool(int(buffer.memory_type()) & int(rt.MemoryType.HOST_VISIBLE))
    device = hal_device or _device_of_results(host_visible, path)
    flat = rt.HalBufferView(buffer, [view.byte_length], _BYTE)
    torch_device = devices.torch_device_of(device)
    with values.as_stored():
        if torch_device.type == "cpu":
            raw = _on_host(device, flat)
        else:
            raw = copy_out(device, buffer, view.byte_length, torch_device)
        return raw.view(dtype).reshape(tuple(view.shape))


def _on_host(device: rt.HalDevice, flat: rt.HalBufferView) -> torch.Tensor:
    """The bytes of a buffer in host memory."""
    try:
        return dlpack.from_dlpack(device.create_dlpack_capsule(flat, _DLPACK_CPU, 0))
    except ValueError:
        # Of a part of an allocation: some releases say in the capsule where it begins, and torch takes none that does.
        return torch.from_numpy(flat.map().asarray((flat.byte_length,), np.dtype(np.uint8)))


def _device_of_results(host_visible: bool, path: tuple[int, ...]) -> rt.HalDevice:
    """The public API does not say which device a buffer belongs to: the only one that fits."""
    if host_visible:
        return devices.hal_device("cpu")
    candidates = [device for device, torch_device in devices.known_devices() if torch_device.type != "cpu"]
    if len(candidates) == 1:
        return candidates[0]
    raise ValueError(
        f"{where(path)}: the buffer does not say which device it belongs to; pass from_variant_list(..., device=...)"
    )


def copy_out(device: rt.HalDevice, buffer: rt.HalBuffer, nbytes: int, torch_device: torch.device) -> torch.Tensor:
    """One copy on the device, by IREE, into memory of torch's; returns it as bytes."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=torch_device)
    if nbytes == 0:
        return target
    # The block may still be written by what torch ran in it before.
    _synchronize(torch_device)
    with devices.current(torch_device):
        landing = device.from_dlpack_capsule(dlpack.to_dlpack(target)).get_buffer()
        done = device.create_semaphore(0)
        device.queue_copy(buffer, landing, [], [(done, 1)])
        done.wait(1)
    return target


class _TensorOwner:
    """Keeps a tensor alive for a `HalArray`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def as_tensor(self) -> torch.Tensor:
        return self.tensor


def tensor_as_array(tensor: torch.Tensor) -> HalArray:
    """A `HalArray` on memory that torch owns."""
    with values.as_stored():
        return HalArray(_TensorOwner(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.device)
