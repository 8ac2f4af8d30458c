# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a module in memory to a callable: the seam between this package and the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

import iree_marshal


class Invoke(Protocol):
    """A loaded program."""

    def __call__(
        self, arguments: Sequence[Any], storage: Sequence[torch.Tensor] | None = None, /
    ) -> Sequence[torch.Tensor]:
        """Run the program.

        Parameters
        ----------
        arguments : sequence
            Its arguments, without those that were fixed.
        storage : sequence of Tensor, optional
            One per result, where the program writes its results into memory of the caller and this caller brings its
            own; without it, one allocation is made for all of them.

        Returns
        -------
        sequence of Tensor
            The results.
        """


def load(
    module: bytes,
    function: str,
    device: torch.device,
    signature: str,
    fixed: Mapping[int, torch.Tensor] | None = None,
) -> Invoke:
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
    fixed : mapping of int to Tensor, optional
        Arguments that are the same in every call, by their index; they are imported once.

    Returns
    -------
    callable
        See :class:`Invoke`.
    """
    executor = iree_marshal.Executor.load(module, function, device=device, signature=signature)
    if fixed:
        executor.bind(fixed)
    declared = executor.signature
    single = declared is not None and len(declared.results) == 1

    def through_executor(arguments: tuple[Any, ...], storage: Sequence[torch.Tensor] | None) -> Any:
        return executor(*arguments, out=storage)

    # Straight to the engine where the executor itself has nothing to add.
    call = executor._engine.call if executor._direct else through_executor

    def invoke(arguments: Sequence[Any], storage: Sequence[torch.Tensor] | None = None, /) -> Sequence[torch.Tensor]:
        returned: Any = call(tuple(arguments), storage)
        return (returned,) if single else returned

    return invoke
