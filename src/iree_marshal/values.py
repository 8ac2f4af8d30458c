# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Admission: what one element of ``values`` becomes, or why it is refused.

Both paths of the crossing ask here, so their refusals agree to the letter. The native
path imports plain tensors without asking and comes here with everything else.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from typing import Any

import iree.runtime as rt
import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from iree_marshal.element_types import HAL_OF
from iree_marshal.errors import where

__all__ = [
    "ALIGNMENT",
    "FLOAT",
    "INT",
    "LIST",
    "NONE",
    "REF",
    "TENSOR",
    "VARIANTS",
    "admit",
    "as_stored",
    "check_depth",
]

TENSOR, INT, FLOAT, NONE, LIST, VARIANTS, REF = range(7)
"""What an element becomes: see `admit`."""

ALIGNMENT = 64
"""Bytes; IREE's host drivers refuse less, and compiled code assumes it on every device."""

# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of the CUDA driver.
_DEVICE_ORDINAL = 9

# Deeper than any program's arguments; a list that contains itself gets here as well.
_DEEPEST = 64

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_INT64 = range(-(2**63), 2**63)

_ACCEPTED = (
    "a torch.Tensor, int, bool, float, None, list, tuple, numpy array, object with __dlpack__ or "
    "__cuda_array_interface__, or a reference of iree.runtime"
)

# numpy's extension types (ml_dtypes) by name: torch.from_numpy does not know them, their bytes are torch's.
_EXTENSION_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in HAL_OF
    if dtype is torch.bfloat16 or str(dtype).startswith("torch.float8")
}


def admit(
    value: Any, path: tuple[int, ...], device: torch.device | None, copy: bool | None, upload: bool = False
) -> tuple[int, Any]:
    """Decide what one element becomes. Nothing is imported or pushed here.

    Parameters
    ----------
    value : object
        The element.
    path : tuple of int
        Its place, outermost index first; for the messages.
    device : torch.device, optional
        Where tensors must be; `None` while no tensor has decided it.
    copy : bool, optional
        `None`: copy what must be copied; `False`: refuse it; `True`: copy every tensor.
    upload : bool
        Copy CPU tensors to `device` instead of refusing them.

    Returns
    -------
    kind : int
        `TENSOR`, `INT`, `FLOAT`, `NONE`, `LIST`, `VARIANTS` or `REF`.
    payload : object
        For `TENSOR` a tensor that is ready to import: strided, compact row-major, aligned
        to `ALIGNMENT` bytes, on `device`, of a dtype that HAL has a type for; the very
        object where nothing had to be done and it is no other subclass. For `LIST` a real list or tuple, no subclass.
    """
    # By its real class: a proxy that only claims to be a tensor would be taken for one by torch's C functions.
    if issubclass(type(value), torch.Tensor):
        return TENSOR, _admit_tensor(value, path, device, copy, upload)
    if isinstance(value, int):
        return INT, _admit_int(int(value), path)
    if isinstance(value, float):
        return FLOAT, float(value)
    if value is None:
        return NONE, None
    if isinstance(value, (list, tuple)):
        check_depth(path)
        return LIST, value if type(value) in (list, tuple) else tuple(value)
    if isinstance(value, rt.VmVariantList):
        return VARIANTS, value
    if _is_reference(value, path):
        return REF, value
    if isinstance(value, np.generic):
        return _admit_numpy_scalar(value, path)
    return TENSOR, _admit_tensor(_as_tensor(value, path, copy), path, device, copy, upload)


def check_depth(path: tuple[int, ...]) -> None:
    """Refuse a list, at `path`, that no program can mean: one that contains itself is met deeper and deeper."""
    if len(path) > _DEEPEST:
        raise ValueError(f"element {path[0]}: lists nested deeper than {_DEEPEST}, or a list that contains itself")


def _is_reference(value: Any, path: tuple[int, ...]) -> bool:
    # What the attribute gives decides, not that it is there: the classes of iree.runtime have it, too.
    try:
        return isinstance(getattr(value, "__iree_vm_ref__", None), rt.VmRef)
    except Exception as error:
        raise TypeError(f"{where(path)}: the {type(value).__name__} gives no reference: {error}") from error


def _admit_int(value: int, path: tuple[int, ...]) -> int:
    if value not in _INT64:
        raise ValueError(f"{where(path)}: {value} does not fit a signed 64-bit integer")
    return value


def _admit_numpy_scalar(value: np.generic, path: tuple[int, ...]) -> tuple[int, Any]:
    if isinstance(value, np.bool_):
        return INT, int(value)
    if isinstance(value, np.integer):
        return INT, _admit_int(operator.index(value), path)
    if isinstance(value, np.floating) or value.dtype.name in _EXTENSION_TYPES:
        exact = float(value)
        if exact == value or exact != exact:
            return FLOAT, exact
    raise TypeError(f"{where(path)}: expected {_ACCEPTED}, got {type(value).__name__} {value!r}")


# ---- tensors -----------------------------------------------------------------------------


def _admit_tensor(
    tensor: torch.Tensor, path: tuple[int, ...], device: torch.device | None, copy: bool | None, upload: bool
) -> torch.Tensor:
    with as_stored():
        _refuse_without_memory(tensor, path)
        if tensor.dtype not in HAL_OF:
            raise TypeError(f"{where(path)}: HAL has no element type for {tensor.dtype}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{where(path)}: the {type(tensor).__name__} requires grad while grad mode is on, and IREE would cut "
                "the graph; pass tensor.detach() or call under torch.no_grad()"
            )
        _refuse_missing_memory(tensor, path)
        with torch.no_grad():
            if device is not None and tensor.device != device:
                tensor = _moved(tensor, path, device, upload)
            tensor = _compacted(tensor, path, copy)
            # What a subclass says of itself ends here.
            return tensor if type(tensor) in _PLAIN else tensor.as_subclass(torch.Tensor)


class as_stored:  # noqa: N801 - reads like a word where it is used
    """Within the block tensors are what they are stored as, and operators make plain ones.

    Neither a subclass nor a mode of the caller's (a fake mode, a default device, a
    transform of torch.func) has a say. A copy made under a fake mode would have no memory.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableFuncTorch(),
        )
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *raised: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def _refuse_without_memory(tensor: torch.Tensor, path: tuple[int, ...]) -> None:
    """Tensors that are no plain memory on a device."""
    name = type(tensor).__name__
    reason = ""
    if torch.nn.parameter.is_lazy(tensor):
        reason = "not initialised yet"
    elif is_traceable_wrapper_subclass(tensor) or isinstance(tensor, torch._subclasses.FakeTensor):
        reason = "a subclass without storage of its own"
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        reason = "wrapped by torch.func"
    elif torch._is_functional_tensor(tensor):
        reason = "a functional tensor"
    elif tensor.is_meta:
        reason = "a meta tensor"
    elif tensor.is_nested:
        reason = "a nested tensor"
    elif tensor.layout is not torch.strided:
        reason = f"of layout {tensor.layout}"
    elif tensor.is_quantized:
        reason = f"quantized ({tensor.dtype})"
    elif torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) and not _pointer(tensor):
        # No flatten method gives this one away; without elements it looks like an empty tensor.
        reason = "a subclass without storage of its own"
    if reason:
        raise TypeError(f"{where(path)}: expected a dense tensor with memory, got a {name} that is {reason}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{where(path)}: IREE has no device for a {name} on {tensor.device}; supported: cpu, cuda")


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _refuse_missing_memory(tensor: torch.Tensor, path: tuple[int, ...]) -> None:
    """Tensors that claim bytes they do not have: lazily zero ones, storages resized under their views."""
    name = type(tensor).__name__
    needed = tensor.numel() * tensor.element_size()
    if needed == 0:
        return
    try:
        pointer = tensor.data_ptr()
        available = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise TypeError(f"{where(path)}: the memory of the {name} cannot be reached: {error}") from None
    if pointer == 0:
        raise ValueError(f"{where(path)}: the {name} of shape {tuple(tensor.shape)} has no memory (null data pointer)")
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if (last + 1) * tensor.element_size() > available:
        raise ValueError(
            f"{where(path)}: the {name} of shape {tuple(tensor.shape)} ends at byte "
            f"{(last + 1) * tensor.element_size()} of a storage of {available}"
        )


def _moved(tensor: torch.Tensor, path: tuple[int, ...], device: torch.device, upload: bool) -> torch.Tensor:
    if tensor.device.type == "cpu" and device.type != "cpu":
        if upload:
            return _uploaded(tensor, device)
        hint = "; pass upload=True to copy CPU tensors there"
    else:
        hint = ""
    raise ValueError(f"{where(path)}: expected a tensor on {device}, got one on {tensor.device}{hint}")


def _uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned memory lets the copy run behind the host, in order on torch's current stream; torch keeps the
    # staging block from being reused until that stream is through with it.
    # Pinned memory of the caller's is staged as well: it may be written again before the copy has run.
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


def _compacted(tensor: torch.Tensor, path: tuple[int, ...], copy: bool | None) -> torch.Tensor:
    """The tensor itself where it can be imported in place, else one compact copy on its own device and stream."""
    reason = ""
    if tensor.is_conj():
        reason = "conjugate view"
    elif tensor.is_neg():
        reason = "negative view"
    elif not tensor.is_contiguous():
        reason = "not contiguous"
    elif tensor.data_ptr() % ALIGNMENT:
        reason = f"memory not aligned to {ALIGNMENT} bytes (address % {ALIGNMENT} = {tensor.data_ptr() % ALIGNMENT})"
    if not reason and copy is not True:
        return tensor
    if reason and copy is False:
        raise ValueError(
            f"{where(path)}: copy=False, but a copy is needed: {reason}; shape {tuple(tensor.shape)}, "
            f"strides {tuple(tensor.stride())}"
        )
    return _copied(tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if target.data_ptr() % ALIGNMENT:
        # torch's own allocators align to more than this; another one may be plugged in.
        size = tensor.element_size()
        room = torch.empty(tensor.numel() + ALIGNMENT // size, dtype=tensor.dtype, device=tensor.device)
        skip = (-room.data_ptr() % ALIGNMENT) // size
        target = room[skip : skip + tensor.numel()].view(tensor.shape)
    return target.copy_(tensor)


# ---- what can be seen as a tensor -----------------------------------------------------------


def _as_tensor(value: Any, path: tuple[int, ...], copy: bool | None) -> torch.Tensor:
    from iree_marshal.arrays import HalArray

    if isinstance(value, HalArray):
        return value.torch()
    if isinstance(value, np.ndarray):
        return _from_numpy(value, path, copy)
    try:
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device=_gpu_of(value))
        if hasattr(value, "__dlpack__"):
            adopted: torch.Tensor = torch.from_dlpack(value)
            return adopted
    except Exception as error:
        raise TypeError(f"{where(path)}: torch cannot adopt the {type(value).__name__}: {error}") from error
    raise TypeError(f"{where(path)}: expected {_ACCEPTED}, got {type(value).__name__}")


def _gpu_of(value: Any) -> torch.device:
    """The GPU whose memory an object with ``__cuda_array_interface__`` describes; the interface does not say it.

    torch would copy it to the current GPU, where that is another one.
    """
    if hasattr(value, "__dlpack_device__"):
        return torch.device("cuda", int(value.__dlpack_device__()[1]))
    address = value.__cuda_array_interface__["data"][0]
    ordinal = ctypes.c_int(-1)
    if torch.version.hip is None and torch.cuda.device_count() > 1 and address:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address)) == 0:
            return torch.device("cuda", ordinal.value)
    return torch.device("cuda")


def _from_numpy(array: np.ndarray[Any, Any], path: tuple[int, ...], copy: bool | None) -> torch.Tensor:
    """A tensor on the array's memory; a copy where torch cannot stand its strides, byte order or protection."""
    reinterpret = _EXTENSION_TYPES.get(array.dtype.name)
    if reinterpret is not None:
        array = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
    reason = ""
    if not array.flags.writeable:
        reason = "read-only"
    elif any(stride < 0 for stride in array.strides):
        reason = "negative strides"
    elif any(stride % array.itemsize for stride in array.strides if array.itemsize):
        reason = "strides that are no multiple of the element size"
    elif array.dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
        reason = "foreign byte order"
    if reason:
        if copy is False:
            raise ValueError(
                f"{where(path)}: copy=False, but a copy is needed: numpy array with {reason}; shape {array.shape}, "
                f"strides {array.strides} bytes"
            )
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    with as_stored():
        try:
            tensor = torch.from_numpy(array)
        except TypeError:
            raise TypeError(f"{where(path)}: torch has no dtype for a numpy array of {array.dtype}") from None
        return tensor if reinterpret is None else tensor.view(reinterpret)
