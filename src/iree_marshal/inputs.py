# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Watches whether a call changes the memory of its arguments (``IREE_MARSHAL_CHECK_INPUTS=1``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch

__all__ = ["InputChangedWarning", "InputWatch", "wanted"]


class InputChangedWarning(RuntimeWarning):
    """A compiled function wrote into the memory of an argument."""


def wanted() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get("IREE_MARSHAL_CHECK_INPUTS", "") == "1"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class InputWatch:
    """Copies of a call's tensors, to compare with after it.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        By the name that the warning shall give them.
    """

    def __init__(self, function: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._function = function
        self._tensors = dict(tensors)
        with torch.no_grad():
            self._before = {name: _bytes(tensor).clone() for name, tensor in tensors.items()}

    def changed(self) -> list[str]:
        """Names of the tensors whose bytes are others than before."""
        with torch.no_grad():
            return [
                name for name, tensor in self._tensors.items() if not torch.equal(_bytes(tensor), self._before[name])
            ]

    def report(self) -> None:
        """Give one warning that names all changed tensors."""
        changed = self.changed()
        if changed:
            warnings.warn(
                f"the call of {self._function} changed the bytes of {', '.join(changed)}; pass copy=True to protect "
                "arguments",
                InputChangedWarning,
                stacklevel=3,
            )
