# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`HalArray`: one HAL buffer view, as any array library can adopt it."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from iree_marshal.element_types import typestr

__all__ = ["HalArray", "Owner"]


class Owner(Protocol):
    """Keeps IREE's buffer, and the device, alive."""

    def as_tensor(self) -> torch.Tensor:
        """The buffer view as a tensor on the same memory."""


class HalArray:
    """One HAL buffer view as an array on IREE's own memory.

    Made by ``from_variant_list(variants, as_arrays=True)``. It owns its buffer and keeps
    the device alive; whoever adopts it through one of the interfaces must keep it (array
    libraries do).

    Attributes
    ----------
    shape : tuple of int
    dtype : torch.dtype
    device : torch.device
    nbytes : int
        Bytes of the elements.
    data_ptr : int
        Address of the first element, the view's byte offset included.

    Notes
    -----
    ``__array_interface__`` (host memory) and ``__cuda_array_interface__`` (version 3; CUDA
    memory) exist only where the dtype has a name in them, so not for bfloat16 and float8.
    Results are complete when they are handed out, so the ``stream`` of the latter is `None`.
    """

    __slots__ = ("__weakref__", "_owner", "data_ptr", "device", "dtype", "nbytes", "shape")

    def __init__(
        self, owner: Owner, data_ptr: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._owner = owner
        self.data_ptr = data_ptr
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"HalArray(shape={self.shape}, dtype={name}, device={self.device}, data_ptr={self.data_ptr:#x})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a HalArray of rank 0")
        return self.shape[0]

    def torch(self) -> torch.Tensor:
        """A tensor on the same memory; it keeps the buffer alive on its own."""
        return self._owner.as_tensor()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A numpy array on the same memory; `TypeError` for CUDA memory and for dtypes that numpy lacks."""
        array: np.ndarray[Any, Any] = self.torch().numpy()
        return array

    def _interface(self, attribute: str, device_type: str) -> dict[str, Any]:
        name = typestr(self.dtype)
        if name is None or self.device.type != device_type:
            raise AttributeError(f"a HalArray of {self.dtype} on {self.device} has no {attribute}")
        # The interfaces demand a null pointer for arrays without elements.
        pointer = self.data_ptr if self.nbytes else 0
        return {"shape": self.shape, "typestr": name, "data": (pointer, False), "strides": None, "version": 3}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface("__array_interface__", "cpu")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._interface("__cuda_array_interface__", "cuda"), "stream": None}

    def __dlpack__(self, **options: Any) -> Any:
        """As the array API standard says; torch heeds ``stream``, ``max_version``, ``dl_device`` and ``copy``."""
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Device type and index, as DLPack numbers them."""
        kind, index = self.torch().__dlpack_device__()
        return kind, index
