# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a compiled module, in a file or in memory, to a context that can be called."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import iree.runtime as rt

from iree_marshal import devices

__all__ = ["Parameters", "function_of", "load_context"]

Parameters = Any
"""A path, a mapping of scopes to paths, a `ParameterIndex` or `ParameterProvider`, or a list of these."""

# Scopes under which a path without one is offered: IREE's default and the one that turbine and others give to weights.
_SCOPES = ("", "model")


def load_context(
    module: str | os.PathLike[str] | bytes | bytearray | memoryview,
    hal_device: rt.HalDevice,
    parameters: Parameters | None,
) -> tuple[rt.VmContext, rt.VmModule]:
    """Load a module, and what it needs, into a context of its own.

    Parameters
    ----------
    module : path or bytes
        A file is mapped into memory, read-only; bytes are copied.
    hal_device : iree.runtime.HalDevice
        Where it runs.
    parameters : optional
        See `Parameters`. Of a path the format is told by the suffix: ``.irpa``, ``.safetensors``, ``.gguf``.

    Returns
    -------
    context, module
    """
    instance = devices.vm_instance()
    program = _module(instance, module)
    modules = [rt.create_hal_module(instance, hal_device)]
    if parameters is not None:
        providers = list(_providers(parameters))
        modules.append(rt.create_io_parameters_module(instance, *providers))
    with devices.current(devices.torch_device_of(hal_device)):
        # Kernels and constants go to the GPU here.
        return rt.VmContext(instance, [*modules, program]), program


def _module(instance: rt.VmInstance, module: Any) -> rt.VmModule:
    if isinstance(module, (str, os.PathLike)):
        # Not VmModule.mmap, which asks for write access.
        with Path(module).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ValueError(f"{os.fspath(module)}: the file is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return rt.VmModule.wrap_buffer(instance, mapped)
    if isinstance(module, (bytes, bytearray, memoryview)):
        return rt.VmModule.copy_buffer(instance, module)
    raise TypeError(f"vmfb: expected a path or bytes, got {type(module).__name__}")


def _providers(parameters: Parameters) -> Iterator[rt.ParameterProvider]:
    if isinstance(parameters, rt.ParameterProvider):
        yield parameters
    elif isinstance(parameters, rt.ParameterIndex):
        for scope in _SCOPES:
            yield parameters.create_provider(scope)
    elif isinstance(parameters, (str, os.PathLike)):
        yield from _providers(_index(parameters))
    elif isinstance(parameters, Mapping):
        for scope, source in parameters.items():
            index = source if isinstance(source, rt.ParameterIndex) else _index(source)
            yield index.create_provider(scope)
    elif isinstance(parameters, (list, tuple)):
        for entry in parameters:
            yield from _providers(entry)
    else:
        raise TypeError(
            "parameters: expected a path, a mapping of scopes to paths, a ParameterIndex, a ParameterProvider or a "
            f"list of these, got {type(parameters).__name__}"
        )


def _index(path: str | os.PathLike[str]) -> rt.ParameterIndex:
    if not Path(path).is_file():
        raise FileNotFoundError(f"parameters: no file {os.fspath(path)}")
    index = rt.ParameterIndex()
    index.load(os.fspath(path))
    return index


def function_of(program: rt.VmModule, name: str) -> tuple[rt.VmFunction, rt.VmFunction | None]:
    """The function of this name, and the one that takes fences beside it, where the module has one."""
    names = program.function_names
    if name not in names:
        exported = sorted(known for known in names if not known.startswith("__"))
        raise ValueError(f"the module {program.name} has no function {name!r}; it has {', '.join(exported) or 'none'}")
    beside = f"{name}$async"
    return program.lookup_function(name), program.lookup_function(beside) if beside in names else None
