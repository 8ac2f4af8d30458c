# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which HAL device belongs to which torch device; one per torch device and process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

import iree.runtime as rt
import torch

from iree_marshal.errors import FORKED

__all__ = [
    "check_not_forked",
    "current",
    "hal_device",
    "hal_uri",
    "known_devices",
    "register_device",
    "resolve",
    "torch_device_of",
    "vm_instance",
]

_lock = threading.RLock()
_instance: rt.VmInstance | None = None
_by_torch_device: dict[torch.device, rt.HalDevice] = {}
# Every HAL device that was handed out or registered, by identity. Kept for the life of the
# process: results may outlive whoever made the device.
_bound: dict[int, tuple[rt.HalDevice, torch.device]] = {}
_forked = False
_thread = threading.local()

_HOST_DRIVERS = ("local-task", "local-sync")


def vm_instance() -> rt.VmInstance:
    """The process-wide VM instance.

    A variant list made before any instance exists crashes the process, because the
    reference types are registered with the first one; every entry point asks here first.
    """
    global _instance
    if _instance is None:
        with _lock:
            if _instance is None:
                _instance = rt.VmInstance()
    return _instance


def check_not_forked() -> None:
    """Raise in a process that was forked after the first use."""
    if _forked:
        raise RuntimeError(FORKED)


def _after_fork_in_child() -> None:
    global _forked
    if not _bound:
        return
    _forked = True
    # A device destructor waits for threads that do not exist in the child: these references
    # are never given back, so that the child can exit. A native one goes unnoticed; one of
    # Python's, where there is no native path, makes the bindings report a leak at exit.
    objects = sys.modules.get("iree_marshal._objects")
    for device, _ in _bound.values():
        if objects is None or not objects.keep_native(device):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))


os.register_at_fork(after_in_child=_after_fork_in_child)


def _normalize(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    raise ValueError(f"torch device {device} has no IREE device; supported: cpu, cuda")


def hal_device(torch_device: torch.device | str) -> rt.HalDevice:
    """The process-wide HAL device of a torch device.

    Parameters
    ----------
    torch_device : torch.device or str
        ``cpu`` (IREE's ``local-task`` driver) or ``cuda:i``, which is matched by the UUID of
        the GPU, whatever ``CUDA_VISIBLE_DEVICES`` says. On a torch built for ROCm the ``hip``
        driver is used, which is untested.

    Returns
    -------
    iree.runtime.HalDevice
        Made at the first request, then always the same one; never destroyed.

    Raises
    ------
    ValueError
        A torch device that IREE has no device for.
    """
    check_not_forked()
    device = _normalize(torch_device)
    with _lock:
        known = _by_torch_device.get(device)
        if known is None:
            vm_instance()
            known = _make(device)
            _bind(known, device)
        return known


@contextlib.contextmanager
def current(torch_device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread, and afterwards the one that was.

    IREE loads programs, allocates memory and records work in whatever context is current on the calling thread, and
    leaves the context of a device that it makes current.
    """
    if torch_device.type == "cpu":
        yield
        return
    with torch.cuda.device(torch_device):
        if not hasattr(_thread, "has_context"):
            # torch sets none where it takes the device for the current one already, as on a thread that is new.
            torch.zeros(1, device=torch_device)
            _thread.has_context = True
        yield


def hal_uri(torch_device: torch.device) -> str:
    """What IREE calls the HAL device of a torch device: ``local-task``, ``cuda://GPU-<uuid>``.

    Raises
    ------
    ValueError
        IREE sees no GPU with the UUID of this one.
    """
    if torch_device.type == "cpu":
        return "local-task"
    driver_name = "cuda" if torch.version.hip is None else "hip"
    uuid = str(torch.cuda.get_device_properties(torch_device).uuid).lower()
    paths = [str(info["path"]) for info in rt.get_driver(driver_name).query_available_devices()]
    for path in paths:
        if uuid in path.lower():
            return f"{driver_name}://{path}"
    raise ValueError(
        f"IREE's {driver_name} driver sees no device with the UUID {uuid} of {torch_device}; it sees {paths}"
    )


def _make(device: torch.device) -> rt.HalDevice:
    # torch's context first: IREE retains the same primary context.
    with current(device):
        return rt.get_device(hal_uri(device))


def _bind(device: rt.HalDevice, torch_device: torch.device) -> None:
    _by_torch_device.setdefault(torch_device, device)
    _bound[id(device)] = (device, torch_device)


def register_device(hal_device: rt.HalDevice, torch_device: torch.device | str) -> None:
    """Name the torch device whose memory a HAL device of the caller's uses.

    It becomes the process-wide device of `torch_device` unless that has one already, and
    is never destroyed from here on: results of it may outlive its maker.

    Parameters
    ----------
    hal_device : iree.runtime.HalDevice
        For example made with driver options of the caller's own.
    torch_device : torch.device or str
        ``cpu`` or ``cuda:i``.

    Raises
    ------
    ValueError
        The device was registered for another torch device before.
    """
    if not isinstance(hal_device, rt.HalDevice):
        raise TypeError(f"hal_device: expected an iree.runtime.HalDevice, got {type(hal_device).__name__}")
    check_not_forked()
    device = _normalize(torch_device)
    with _lock:
        vm_instance()
        known = _bound.get(id(hal_device))
        if known is not None and known[1] != device:
            raise ValueError(f"this HAL device is already registered for {known[1]}, not for {device}")
        _bind(hal_device, device)


def torch_device_of(hal_device: rt.HalDevice) -> torch.device:
    """The torch device whose memory a HAL device uses.

    Host devices are recognised by their driver; any other one must have been handed out by
    `hal_device` or named with `register_device`.
    """
    check_not_forked()
    known = _bound.get(id(hal_device))
    if known is not None:
        return known[1]
    if repr(hal_device) in _HOST_DRIVERS:
        with _lock:
            # Kept like all others, but not the process-wide one.
            _bound[id(hal_device)] = (hal_device, torch.device("cpu"))
        return torch.device("cpu")
    raise ValueError(
        f"the HAL device {hal_device!r} is not known; name its torch device with "
        "iree_marshal.register_device(hal_device, torch_device)"
    )


def resolve(device: torch.device | str | rt.HalDevice) -> tuple[rt.HalDevice, torch.device]:
    """The HAL device and the torch device that a ``device=`` argument names."""
    if isinstance(device, rt.HalDevice):
        return device, torch_device_of(device)
    if isinstance(device, (str, torch.device)):
        known = hal_device(device)
        return known, torch_device_of(known)
    raise TypeError(f"device: expected a torch.device, str or iree.runtime.HalDevice, got {type(device).__name__}")


def known_devices() -> list[tuple[rt.HalDevice, torch.device]]:
    """Every HAL device that was handed out or registered, with its torch device."""
    with _lock:
        return list(_bound.values())
