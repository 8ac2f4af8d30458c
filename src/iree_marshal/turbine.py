# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""iree-turbine with this package's crossing: zero-copy arguments and results on the CPU, and real CUDA devices.

::

    import iree_marshal.turbine

    iree_marshal.turbine.accelerate()              # for the rest of the process
    with iree_marshal.turbine.accelerate():        # or for a while
        torch.compile(model, backend="iree_turbine")(x)

Turbine 3.9.0 copies every argument on every call and asks for the driver named "hip" where there is a CUDA device.
While accelerated, ``Launchable`` imports its arguments in place, keeps every result at its position (turbine drops
`None` arguments and integer results), writes ``outputs=`` (turbine does not), and compiles float64 as float64
(turbine's default flags turn it into float32, so that the second Python float of a compiled function arrives as zero).

What is turbine's own stays so, as seen with 3.9.0: results are row-major whatever strides eager has, uint8 results come
back as int8, and a symbolic integer among a compiled graph's inputs is an ``AttributeError``.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

import iree_marshal
from iree_marshal import devices

_TESTED_VERSION = "3.9.0"
# The im2col flag because convolutions are slower, on CUDA also wrong, without it (see iree_marshal.backend.toolchain).
_FLAGS = ("--iree-input-demote-f64-to-f32=false", "--iree-global-opt-use-im2col-for-convs")

_lock = threading.Lock()
# The accelerations in force; the latest one's choices count, and the end of the last one restores turbine.
_active: list[Acceleration] = []
_originals: dict[str, Any] = {}
# Turbine's devices carry a timeline that belongs to one thread.
_per_thread = threading.local()

# Operators whose first operand IREE updates in place, and those that hand their operand on, in the torch dialect.
_UPDATE = re.compile(
    r"%\S+ = torch\.aten\.(?:_?index_put\w*|_unsafe_index_put"
    r"|(?:select_|slice_|masked_|as_strided_|diagonal_)?scatter\w*"
    r"|index_(?:add|copy|fill|reduce)|put|sort|topk)(?:\.\w+)* (%\w+)"
)
_HANDS_ON = re.compile(
    r"(%\w+) = torch\.aten\.(?:view|reshape|_unsafe_view|_reshape_alias|squeeze|unsqueeze|slice|select|alias|detach"
    r"|clone|contiguous|flatten|unflatten|expand|permute|transpose|t|lift_fresh_copy)(?:\.\w+)* (%\w+)"
)


class Acceleration:
    """Turbine's launcher with our crossing, until :meth:`undo` or the end of a ``with`` block."""

    def __init__(self, copy: bool | None = None) -> None:
        self.copy = copy
        with _lock:
            if not _active:
                _install()
            _active.append(self)

    def undo(self) -> None:
        """Take this acceleration back. A second call does nothing."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if not _active:
                _restore()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def accelerate(copy: bool | None = None) -> Acceleration:
    """Make turbine's ``Launchable``, and so ``torch.compile(backend="iree_turbine")``, use this package's crossing.

    Parameters
    ----------
    copy : bool, optional
        As in :func:`iree_marshal.to_variant_list`: by default tensors cross in place. A compiled function may write
        into the memory of an argument; with ``True`` it always gets a copy, which is what turbine does. Programs that
        turbine compiles from MLIR text are read for updates of their arguments, and those arguments are copied in any
        case.

    Returns
    -------
    Acceleration
        In force already. Use it in a ``with`` statement, or call its ``undo()``, to end it.

    Raises
    ------
    ImportError
        iree-turbine is not installed.
    RuntimeError
        An iree-turbine without the parts that this relies on; the text says what was found and what is supported.
    """
    return Acceleration(copy)


def _turbine(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError("iree-turbine is not installed: pip install iree-turbine") from error


def _install() -> None:
    launch = _turbine("iree.turbine.runtime.launch")
    device = _turbine("iree.turbine.runtime.device")
    launchable = getattr(launch, "Launchable", None)
    wanted = {
        "Launchable._resolve_target_binary": hasattr(launchable, "_resolve_target_binary"),
        "Launchable.jit_compile": hasattr(launchable, "jit_compile"),
        "launch.get_device_from_torch": hasattr(launch, "get_device_from_torch"),
        "launch.invoke_vm_function": hasattr(launch, "invoke_vm_function"),
        "device.DeviceState": hasattr(device, "DeviceState"),
        "device._NullSemaphoreInterop": hasattr(device, "_NullSemaphoreInterop"),
    }
    missing = [name for name, there in wanted.items() if not there]
    if missing or launchable is None:
        raise RuntimeError(
            f"this iree-turbine has no {', '.join(missing)}; iree_marshal.turbine is tested with {_TESTED_VERSION}"
        )
    _originals.update(
        call=launchable.__call__,
        jit_compile=launchable.__dict__["jit_compile"],
        get_device_from_torch=launch.get_device_from_torch,
    )
    launchable.__call__ = _launch
    launchable.jit_compile = staticmethod(_jit_compile)
    launch.get_device_from_torch = _device_of


def _restore() -> None:
    launch = _turbine("iree.turbine.runtime.launch")
    launch.Launchable.__call__ = _originals["call"]
    launch.Launchable.jit_compile = _originals["jit_compile"]
    launch.get_device_from_torch = _originals["get_device_from_torch"]
    _originals.clear()


def _device_of(torch_device: torch.device) -> Any:
    """Return turbine's device object on this package's HAL device, one per thread and torch device."""
    if torch_device.type == "cuda" and torch.version.hip is not None:
        # Turbine's HIP device runs on torch's own stream; that is as good as it gets.
        return _originals["get_device_from_torch"](torch_device)
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    kept = _per_thread.__dict__.setdefault("devices", {})
    if torch_device not in kept:
        kept[torch_device] = _make_device(torch_device)
    return kept[torch_device]


def _make_device(torch_device: torch.device) -> Any:
    module = _turbine("iree.turbine.runtime.device")
    hal_device = iree_marshal.hal_device(torch_device)
    driver = "cuda" if torch_device.type == "cuda" else "local-task"
    state = module.DeviceState(
        driver=driver,
        device=hal_device,
        torch_device=torch_device,
        dlpack_device_type_code=2 if driver == "cuda" else 1,
    )
    device = module.Device(device_state=state)
    # Our import makes IREE's stream wait for torch's; turbine's interop would block the host for the same.
    device._device_interop = module._NullSemaphoreInterop(True)
    flags: tuple[str, ...] = _FLAGS
    if driver == "cuda":
        from iree_marshal.backend.toolchain import cuda_target

        flags += (f"--iree-cuda-target={cuda_target(*torch.cuda.get_device_capability(torch_device))}",)
    device.compile_target_flags = (*device.compile_target_flags, *flags)
    device._recompute_target_keys()
    # Turbine keeps loaded programs by this key; one loaded on turbine's own HAL device must not meet our buffers.
    device.instance_cache_key = f"iree_marshal:{torch_device}:{threading.get_ident()}"
    return device


def _jit_compile(source: Any, **more: Any) -> Any:
    launchable = _originals["jit_compile"].__func__(source, **more)
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    launchable._iree_marshal_updated = updated_arguments(text) if isinstance(text, str) else frozenset()
    return launchable


def updated_arguments(program: str) -> frozenset[int]:
    """Return which arguments of a torch-dialect program IREE may update in place.

    Parameters
    ----------
    program : str
        MLIR text with one function, whose arguments are named ``%arg0``, ``%arg1``, ... as the importer does.

    Returns
    -------
    frozenset of int
        Places of the arguments that reach the first operand of an updating operator through views and copies.
    """
    matches = (_HANDS_ON.search(line) for line in program.splitlines())
    origin: dict[str, str] = {match[1]: match[2] for match in matches if match}
    found = set()
    for updated in _UPDATE.findall(program):
        operand: str = updated
        while operand in origin:
            operand = origin[operand]
        if operand.startswith("%arg") and operand[4:].isdigit():
            found.add(int(operand[4:]))
    return frozenset(found)


def _launch(self: Any, *args: Any, device: Any = None, outputs: Sequence[torch.Tensor] = ()) -> Any:
    """Launch as turbine's ``Launchable`` does, through this package's crossing.

    Parameters
    ----------
    *args : Tensor, int, float or None
        The function's arguments, each at its place.
    device : torch.device, optional
        Where to run; by default where the tensors are.
    outputs : sequence of Tensor, optional
        Receive the results' values, one tensor per result.

    Returns
    -------
    object
        Nothing for no result, one result bare, several as a list; ``outputs`` in their place where given.
    """
    launch = _turbine("iree.turbine.runtime.launch")
    runtime: Any = importlib.import_module("iree.runtime")
    torch_device = None if device is None else torch.device(device)
    for value in args:
        if isinstance(value, torch.Tensor):
            torch_device = torch_device or value.device
            if value.device.type != torch_device.type or (
                torch_device.index is not None and value.device.index != torch_device.index
            ):
                raise RuntimeError(
                    f"Cannot launch with tensors from multiple devices: {value.device} vs {torch_device}"
                )
    if torch_device is None:
        raise RuntimeError(f"Cannot invoke Launchable {self} without any Tensor args or an explicit device=")
    turbine_device = launch.get_device_from_torch(torch_device)
    with devices.current(torch_device):
        context, function = self._resolve_target_binary(turbine_device)
    updated: frozenset[int] = getattr(self, "_iree_marshal_updated", frozenset())
    values = [value.clone() if place in updated else value for place, value in enumerate(args)]
    copy = _active[-1].copy if _active else None
    # Turbine launches tensors that require grad as what they are; so do we.
    with torch.no_grad():
        arguments = iree_marshal.to_variant_list(values, device=turbine_device.hal_device, copy=copy)
    results = runtime.VmVariantList(0)
    with devices.current(torch_device):
        launch.invoke_vm_function(turbine_device, self._is_async, context, function, arguments, results)
    returned = iree_marshal.from_variant_list(results)
    if outputs:
        if len(outputs) != len(returned):
            raise ValueError(f"outputs: expected {len(returned)} tensors, one per result, got {len(outputs)}")
        with torch.no_grad():
            returned = [output.copy_(result) for output, result in zip(outputs, returned, strict=True)]
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else returned
