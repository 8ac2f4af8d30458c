# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory for results that are written into storage arguments: one allocation per call, or the caller's own."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from iree_marshal.signature import Signature, TensorType
from iree_marshal.values import ALIGNMENT

__all__ = [
    "SLICE_ALIGNMENT",
    "Layout",
    "Slice",
    "check_extents",
    "check_out",
    "extent",
    "out_tensors",
    "real_memory",
    "retyped",
    "settle_result",
]

SLICE_ALIGNMENT = 256
"""Bytes; where each result begins. What GPU allocators give, and more than any vector unit asks for."""


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


def real_memory() -> AbstractContextManager[None]:
    """Within it torch makes, views and writes memory itself.

    A mode that the caller is in (of fake tensors, say) or a transform of torch.func would answer with tensors
    that have no memory, and IREE would write through their null pointers.
    """
    if torch._C._len_torch_dispatch_stack() == 0 and torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return _without_modes()


def retyped(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor's own memory as elements of another dtype."""
    with real_memory():
        return tensor.view(dtype)


@dataclass(frozen=True)
class Slice:
    """One result's place in the slab."""

    result: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout:
    """Where each result of a function lies in one allocation.

    Parameters
    ----------
    signature : Signature
        Of the function; the results with storage arguments are laid out.
    device : torch.device
        Where the memory is.

    Attributes
    ----------
    slices : dict of int to Slice
        By the index of the result.
    missing : str
        Why no slab can be made (a result of dynamic shape or of a type that torch has not), or "".
    """

    def __init__(self, signature: Signature, device: torch.device) -> None:
        self.device = device
        self.slices: dict[int, Slice] = {}
        self.missing = ""
        offset = 0
        for result in sorted(signature.storage):
            value = signature.results[result]
            kind = value.abi_type
            if not isinstance(kind, TensorType) or kind.dtype is None:
                self.missing = f"result {result} ({value.name}) is a {kind}, which is no tensor of torch's"
                return
            if not kind.static:
                self.missing = f"result {result} ({value.name}) is a {kind}, whose size is not known before the call"
                return
            shape = tuple(size for size in kind.shape if size is not None)
            nbytes = math.prod(shape) * kind.dtype.itemsize
            self.slices[result] = Slice(result, kind.dtype, shape, offset, nbytes)
            offset += -(-nbytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
        self.nbytes = offset

    def allocate(self) -> dict[int, torch.Tensor]:
        """One new allocation, as a tensor per result."""
        if self.missing:
            raise ValueError(f"{self.missing}; pass out=[...] with tensors to write into")
        with real_memory():
            # torch's CPU allocator aligns to less than a slice wants.
            base = torch.empty(self.nbytes + SLICE_ALIGNMENT, dtype=torch.uint8, device=self.device)
            start = -base.data_ptr() % SLICE_ALIGNMENT
            typed: dict[torch.dtype, torch.Tensor] = {}
            tensors = {}
            for result, piece in self.slices.items():
                if piece.dtype not in typed:
                    typed[piece.dtype] = base.view(piece.dtype)
                at = (start + piece.offset) // piece.dtype.itemsize
                # As `.data`, no view to autograd: one result changed in place must not count as a change of all.
                tensors[result] = typed[piece.dtype].as_strided(piece.shape, _strides(piece.shape), at).data
        return tensors

    def allocate_lasting(self) -> dict[int, torch.Tensor]:
        """The same for tensors that calls to come write into as well, whether in inference mode or not."""
        with torch.inference_mode(False):
            return self.allocate()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# ---- the caller's own memory ------------------------------------------------------------------


def out_tensors(signature: Signature | None, out: Sequence[Any]) -> Sequence[Any]:
    """Check the shape of ``out=`` itself: one entry per result, tensors only where the function declares storage."""
    if signature is None or not signature.storage:
        raise ValueError(
            "out=: the function declares no storage arguments (iree.abi.output), so IREE allocates its results itself; "
            "compile it with storage arguments or copy the results"
        )
    if isinstance(out, (torch.Tensor, str, bytes)) or not isinstance(out, Sequence):
        raise TypeError(f"out: expected a list with one tensor per result, got {type(out).__name__}")
    if len(out) != len(signature.results):
        plural = "" if len(signature.results) == 1 else "s"
        raise ValueError(f"out: expected {len(signature.results)} tensor{plural}, one per result, got {len(out)}")
    for result, tensor in enumerate(out if len(signature.storage) != len(out) else ()):
        if tensor is not None and result not in signature.storage:
            name = signature.results[result].name
            raise ValueError(f"out[{result}] ({name}): expected None, the function declares no storage for this result")
    return out


def check_out(signature: Signature, result: int, tensor: Any, device: torch.device) -> None:
    """Refuse a tensor that a result cannot be written into.

    Raises
    ------
    TypeError
        Not a plain tensor.
    ValueError
        Wrong dtype, shape, device or strides, not aligned, or part of an autograd graph.
    """
    value = signature.results[result]
    kind = value.abi_type
    place = f"out[{result}] ({value.name})"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{place}: expected a torch.Tensor or None, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{place}: expected a tensor on {device}, got one on {tensor.device}")
    shape = tuple(tensor.shape)
    if isinstance(kind, TensorType) and not kind.admits(tensor.dtype, shape):
        raise ValueError(f"{place}: expected {kind}, got a tensor of shape {shape} and dtype {tensor.dtype}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        strides = tuple(tensor.stride()) if tensor.layout is torch.strided else tensor.layout
        raise ValueError(f"{place}: expected contiguous memory, got shape {shape} with strides {strides}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{place}: expected plain memory, got a conjugate or negative view")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{place}: the tensor requires grad while grad mode is on, and writing into it would not be recorded; "
            "call under torch.no_grad()"
        )
    pointer = tensor.data_ptr()
    if pointer % ALIGNMENT:
        raise ValueError(
            f"{place}: expected memory aligned to {ALIGNMENT} bytes, got address % {ALIGNMENT} = {pointer % ALIGNMENT}"
        )
    needed = tensor.numel() * tensor.element_size()
    available = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if needed and (pointer == 0 or needed > available):
        raise ValueError(f"{place}: expected {needed} bytes of memory, got a storage with {max(available, 0)} there")


Extent = tuple[int, int]


def check_extents(outs: Mapping[str, Extent], inputs: Mapping[str, Extent]) -> None:
    """Refuse results that would be written over each other or over an argument.

    Extents are addresses, the last one exclusive; keys name what lies there in the message.
    """
    taken = sorted((start, end, name) for name, (start, end) in outs.items() if start < end)
    for (_, end, first), (start, _, second) in itertools.pairwise(taken):
        if start < end:
            raise ValueError(f"{second}: its memory overlaps {first}")
    for name, (start, end) in inputs.items():
        for out_start, out_end, out_name in taken:
            if out_start < end and start < out_end and start < end:
                raise ValueError(f"{out_name}: its memory overlaps {name}")


def extent(tensor: torch.Tensor) -> Extent:
    """Addresses of a compact tensor's first byte and of the byte behind its last."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def settle_result(signature: Signature, result: int, tensor: torch.Tensor, returned: Any) -> None:
    """Make sure that `tensor` holds what the function returned for the result that was to be written into it.

    A program may hand out other memory all the same, for a result that is one of its arguments or a constant.
    """
    if not isinstance(returned, torch.Tensor):
        raise TypeError(f"result {result} ({signature.results[result].name}): expected a tensor, got {returned!r}")
    if returned.shape != tensor.shape:
        raise ValueError(
            f"out[{result}] ({signature.results[result].name}): expected shape {tuple(returned.shape)}, the result's, "
            f"got {tuple(tensor.shape)}"
        )
    if returned.data_ptr() != tensor.data_ptr() and tensor.numel():
        with torch.no_grad(), real_memory():
            tensor.copy_(returned if returned.dtype == tensor.dtype else returned.view(tensor.dtype))
