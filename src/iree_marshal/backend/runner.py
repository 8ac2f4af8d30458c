# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a module in memory to a callable: the seam between this package and the executor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import iree_marshal

# Arguments, and the tensors that receive the results where the program writes into storage arguments.
Invoke = Callable[[Sequence[Any], Sequence[torch.Tensor] | None], Sequence[torch.Tensor]]


def load(module: bytes, function: str, device: torch.device, signature: str) -> Invoke:
    """Load a module on the HAL device of a torch device.

    Parameters
    ----------
    module : bytes
        The compiled module (vmfb).
    function : str
        Its function.
    device : torch.device
        Where its arguments live.
    signature : str
        Of the function, in the grammar of ``iree.abi.declaration``.

    Returns
    -------
    callable
        Takes the function's arguments as one sequence, returns its results as a sequence of tensors.
    """
    runtime: Any = importlib.import_module("iree.runtime")
    hal_device = iree_marshal.hal_device(device)
    instance = runtime.VmInstance()
    hal = runtime.create_hal_module(instance, hal_device)
    program = runtime.VmModule.copy_buffer(instance, module)
    context = runtime.VmContext(instance, [hal, program])
    entry = program.lookup_function(function)

    def invoke(arguments: Sequence[Any], storage: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
        results = runtime.VmVariantList(8)
        passed = arguments if storage is None else [*arguments, *storage]
        context.invoke(entry, iree_marshal.to_variant_list(passed, device=device), results)
        returned: Sequence[torch.Tensor] = iree_marshal.from_variant_list(results)
        return returned if storage is None else storage

    return invoke
