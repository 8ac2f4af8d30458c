# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The two entry points of custom executors: tensors into a variant list, and results out of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import iree.runtime as rt
import torch

from iree_marshal import devices, paths

__all__ = ["from_variant_list", "order", "record_stream", "to_variant_list"]

DeviceLike: TypeAlias = "torch.device | str | rt.HalDevice"


def _as_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, (torch.Tensor, str, bytes, dict, set, frozenset)):
        raise TypeError(f"values: expected a sequence of values, got one {type(values).__name__}; wrap it in a list")
    return tuple(values)


def to_variant_list(
    values: Iterable[Any],
    *,
    device: DeviceLike | None = None,
    copy: bool | None = None,
    order: bool = True,
    upload: bool = False,
) -> rt.VmVariantList:
    """Import every value of a sequence into a new variant list, tensors without a copy.

    A tensor becomes a buffer view on its own memory and is kept alive until IREE lets
    go of it. A compiled function may write into the memory of its arguments, and a
    result may be the very buffer of an argument; ``copy=True`` protects from both.

    Parameters
    ----------
    values : iterable
        `torch.Tensor` (any shape; every dtype that HAL has a type for), `int` and
        `bool` (as i64), `float` (as f64), `None` (null reference), lists and tuples
        (nested lists), numpy arrays, objects with ``__dlpack__`` or
        ``__cuda_array_interface__``, and `VmVariantList`, `HalBufferView`, `HalBuffer`,
        `HalFence`, `VmRef` as they are.
    device : torch.device, str or iree.runtime.HalDevice, optional
        Where the tensors must be. By default the device of the first tensor.
    copy : bool, optional
        `None`: copy only what cannot be imported in place (non-contiguous, not aligned to
        64 bytes, conjugate or negative views), compactly, on the tensor's own device and
        stream. `False`: refuse it instead. `True`: copy every tensor.
    order : bool
        On CUDA, make IREE's stream wait for what torch's current stream has been given so
        far. `False` leaves the order to the caller.
    upload : bool
        Copy CPU tensors to a CUDA `device` instead of refusing them.

    Returns
    -------
    iree.runtime.VmVariantList
        One entry per value, in order.

    Raises
    ------
    TypeError
        An element that IREE has no type for; the message names its index and class.
    ValueError
        A tensor that requires grad while grad mode is on, that is on another device, that
        would need a copy under ``copy=False``, or whose memory does not hold its elements.
    RuntimeError
        In a process forked after the first use, or when HAL refuses a buffer. HAL statuses
        raise the same classes as in `iree.runtime`.

    Notes
    -----
    Atomic: when an element fails, nothing of those before it stays imported.

    Examples
    --------
    >>> import torch, iree_marshal as im
    >>> arguments = im.to_variant_list([torch.ones(4), 3])
    >>> len(arguments)
    2
    """
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"copy: expected None, True or False, got {copy!r}")
    path = paths.active()
    # The native path reads the items of a real list or tuple in place; a subclass may say otherwise what it holds.
    sequence = values if type(values) is list or type(values) is tuple else _as_tuple(values)
    hal_device, torch_device = devices.resolve(device) if device is not None else (None, None)
    return path.to_variant_list(sequence, hal_device, torch_device, copy, order, upload)


def from_variant_list(
    variants: rt.VmVariantList, *, as_arrays: bool = False, device: DeviceLike | None = None
) -> list[Any]:
    """Hand out the values of a variant list, buffer views without a copy.

    Parameters
    ----------
    variants : iree.runtime.VmVariantList
        For example the outputs of `VmContext.invoke`. It may be dropped at once: every
        result keeps its own buffer, and the device, alive.
    as_arrays : bool
        Buffer views become `HalArray` instead of `torch.Tensor`.
    device : torch.device, str or iree.runtime.HalDevice, optional
        The device of buffers that do not say it themselves (host buffers of IREE do not).
        By default the process-wide device; name the caller's own one where it may be
        destroyed before its results are.

    Returns
    -------
    list
        `torch.Tensor` on the buffer's device, row-major, for buffer views (integers of HAL
        without a sign become signed ones); `int` and `float` for scalars; `None` for null
        references; lists for nested lists; other references as `iree.runtime` objects.
        Tensors in host memory that IREE carved out of one allocation share one
        `untyped_storage()`, as views of a tensor do; ``clone`` one before `torch.save` writes
        all of them.

    Raises
    ------
    TypeError
        A buffer view whose element type torch has no dtype for; the message names its index.
    ValueError
        A buffer of a HAL device that `iree_marshal` does not know.
    """
    if not isinstance(variants, rt.VmVariantList):
        raise TypeError(f"variants: expected an iree.runtime.VmVariantList, got {type(variants).__name__}")
    path = paths.active()
    hal_device = None if device is None else devices.resolve(device)[0]
    results: list[Any] = path.from_variant_list(variants, hal_device, as_arrays)
    return results


def order(device: DeviceLike) -> None:
    """Make IREE's work wait for what torch's current stream was given so far.

    `to_variant_list` and `Executor` do this themselves. It is for a variant list that is used
    again after its tensors were written anew.

    Parameters
    ----------
    device : torch.device, str or iree.runtime.HalDevice
        On ``cpu`` there is nothing to do.
    """
    path = paths.active()
    hal_device, torch_device = devices.resolve(device)
    if torch_device.type != "cpu":
        path.order(hal_device)


def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Say that a result is used on a stream other than the one it will be dropped on.

    IREE gets the memory of a dropped result back once the stream that was current at the
    drop has passed it. Work on other streams is waited for only where it was named here;
    like `torch.Tensor.record_stream`, which memory of IREE's does not heed.

    Parameters
    ----------
    tensor : torch.Tensor
        A result; its device tells which IREE device is meant. The stream is waited for
        with all later drops on that device.
    stream : torch.cuda.Stream
        Of the tensor's device.

    Raises
    ------
    ValueError
        A stream of another device: no event of this one can wait for it.
    """
    if tensor.device.type == "cpu":
        return
    if stream.device != tensor.device:
        raise ValueError(
            f"stream: expected a stream of {tensor.device}, the tensor's device, got one of {stream.device}"
        )
    path = paths.active()
    # A tensor does not say which of the HAL devices on its GPU it came from.
    devices.hal_device(tensor.device)
    for hal_device, place in devices.known_devices():
        if place == tensor.device:
            path.record_stream(hal_device, stream.cuda_stream)
