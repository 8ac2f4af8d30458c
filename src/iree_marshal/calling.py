# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One invocation in three steps, on top of whichever path is active.

`prepare` checks and imports the arguments and provides storage for results, `run` invokes, `collect` hands the results
out. `iree_marshal._executor.NativeEngine` does the same natively and keeps what it knows of the last call; this engine
starts anew each time, and serves where the native path is not proven, and as the oracle of the tests.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import iree.runtime as rt
import torch

from iree_marshal import arguments, devices, slab, values
from iree_marshal.element_types import HAL_OF
from iree_marshal.selfcheck import is_older, runtime_version
from iree_marshal.signature import Signature, Value

__all__ = ["Frame", "PortableEngine", "Program", "Timing", "as_returned", "wants_buffer"]


@dataclass(frozen=True)
class Timing:
    """How long the steps of one call took, in nanoseconds.

    `marshal_in` and `marshal_out` are the crossing, `order` is making IREE's stream wait for torch's, `invoke` is
    IREE's own time (of a function with fences: until it returned, not until its work was done).
    """

    marshal_in: int
    order: int
    invoke: int
    marshal_out: int


@dataclass(frozen=True)
class Program:
    """A function, where it runs, and how its values cross."""

    invoke: Callable[[rt.VmFunction, rt.VmVariantList, rt.VmVariantList], None]
    function: rt.VmFunction
    hal_device: rt.HalDevice
    torch_device: torch.device
    signature: Signature | None
    fences: bool
    copy: bool | None
    upload: bool
    reuse_outputs: bool
    path: Any

    def argument(self, index: int) -> Value | None:
        """What the function takes at `index`, where that is known."""
        if self.signature is None or index >= len(self.signature.arguments):
            return None
        return self.signature.arguments[index]


def wants_buffer(value: Value | None) -> bool:
    """Whether a storage argument is a plain buffer and not a buffer view."""
    return value is not None and str(value.abi_type) == "!hal.buffer"


def as_returned(results: list[Any]) -> Any:
    """What a call returns: nothing, the one result, or a tuple."""
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


@functools.cache
def _takes_any_float() -> bool:
    """Whether IREE converts a float that is passed for an f32."""
    return not is_older(runtime_version(), "3.10")


class Frame:
    """What belongs to one call while it runs."""

    def __init__(
        self,
        variants: rt.VmVariantList,
        outputs: dict[int, torch.Tensor],
        landings: dict[int, rt.HalBufferView],
    ) -> None:
        self.arguments = variants
        self.results = rt.VmVariantList(1)
        self.outputs = outputs
        self.landings = landings
        self.times = [0, 0, 0, 0]


class PortableEngine:
    """Calls a program through public calls alone."""

    def __init__(self, program: Program, layout: slab.Layout | None) -> None:
        self.program = program
        self.timing = False
        self.last_timing: Timing | None = None
        self._layout = layout
        self._static: dict[int, torch.Tensor] | None = None
        # Index -> what is passed, and the tensor behind it where there is one.
        self._bound: dict[int, tuple[Any, torch.Tensor | None]] = {}

    # ---- fixed arguments ----

    def bind(self, fixed: Mapping[int, Any]) -> None:
        """Fix arguments for all calls to come; all of them or, on failure, none."""
        checked: dict[int, tuple[Any, torch.Tensor | None]] = {}
        for index, value in fixed.items():
            kind, payload = self._settle(index, value)
            if kind == values.TENSOR:
                # An alias: what the caller does to its own tensor object later leaves the memory alone.
                alias = payload.detach()
                held = self._import([alias])
                checked[index] = (held.get_as_object(0, rt.HalBufferView), alias)
            else:
                checked[index] = (payload, None)
        self._bound = {**self._bound, **checked}

    def unbind(self, indices: Sequence[int]) -> None:
        """Take arguments again from the caller."""
        self._bound = {index: value for index, value in self._bound.items() if index not in indices}

    def bound(self) -> Mapping[int, torch.Tensor | None]:
        """The fixed arguments: the tensor, or `None` for what is no tensor."""
        return {index: tensor for index, (_, tensor) in self._bound.items()}

    # ---- the three steps ----

    def prepare(self, args: tuple[Any, ...], out: Sequence[Any] | None, fences: tuple[Any, ...] = ()) -> Frame:
        """Check and import everything that one call passes."""
        begun = time.perf_counter_ns()
        program = self.program
        signature = program.signature
        bound = self._bound
        storage: Mapping[int, int] = {} if signature is None else signature.storage
        inputs = range(len(args) + len(bound)) if signature is None else signature.inputs
        expected = [index for index in inputs if index not in bound]
        if len(args) != len(expected):
            raise arguments.count_error(signature, expected, len(bound), len(args))
        count = len(inputs) + len(storage)
        passed: list[Any] = [None] * count
        tensors = {
            arguments.place_of(index, program.argument(index)): tensor
            for index, (_, tensor) in bound.items()
            if tensor is not None
        }
        for index, (payload, _) in bound.items():
            if index >= count:
                raise arguments.count_error(signature, expected, len(bound), len(args))
            passed[index] = payload
        for index, value in zip(expected, args, strict=True):
            expectation = program.argument(index)
            kind, payload = self._settle(index, value)
            passed[index] = payload
            if kind == values.TENSOR:
                tensors[arguments.place_of(index, expectation)] = payload
        outputs = self._storage(out)
        landings: dict[int, rt.HalBufferView] = {}
        if outputs and signature is not None:
            slab.check_extents(
                {
                    f"out[{result}] ({signature.results[result].name})": slab.extent(tensor)
                    for result, tensor in outputs.items()
                },
                {place: slab.extent(tensor) for place, tensor in tensors.items()},
            )
            for result, tensor in outputs.items():
                landing = self._landing(tensor)
                buffers = wants_buffer(program.argument(storage[result]))
                passed[storage[result]] = landing.get_buffer() if buffers else landing
                landings[result] = landing
        frame = Frame(self._import([*passed, *fences]), outputs, landings)
        frame.times[0] = time.perf_counter_ns() - begun
        begun = time.perf_counter_ns()
        if program.torch_device.type != "cpu":
            program.path.order(program.hal_device)
        frame.times[1] = time.perf_counter_ns() - begun
        return frame

    def run(self, frame: Frame) -> None:
        """Invoke."""
        begun = time.perf_counter_ns()
        with devices.current(self.program.torch_device):
            self.program.invoke(self.program.function, frame.arguments, frame.results)
        frame.times[2] = time.perf_counter_ns() - begun

    def collect(self, frame: Frame) -> Any:
        """Hand out the results; the frame must not be used any more."""
        begun = time.perf_counter_ns()
        results = self._results(frame)
        if self.timing:
            frame.times[3] = time.perf_counter_ns() - begun
            self.last_timing = Timing(*frame.times)
        return as_returned(results)

    def call(self, args: tuple[Any, ...], out: Sequence[Any] | None) -> Any:
        """All three steps."""
        frame = self.prepare(args, out)
        self.run(frame)
        return self.collect(frame)

    def abandon(self, frame: Frame) -> None:
        """Drop the frame of a call that failed."""

    def trim(self) -> None:
        """Drop what is kept for the next call; this engine keeps nothing."""

    # ---- pieces ----

    def _settle(self, index: int, value: Any) -> tuple[int, Any]:
        program = self.program
        expected = program.argument(index)
        if expected is not None and str(expected.abi_type) == "f32" and not _takes_any_float():
            raise NotImplementedError(
                f"{arguments.place_of(index, expected)}: iree-base-runtime before 3.10 takes the low bytes of a float "
                "for an f32, and has no public call that passes one; use the native path"
            )
        return arguments.settle(index, expected, value, program.torch_device, program.copy, program.upload)

    def _import(self, sequence: Sequence[Any]) -> rt.VmVariantList:
        program = self.program
        # Copies were made, or refused, when each value was admitted.
        variants: rt.VmVariantList = program.path.to_variant_list(
            list(sequence), program.hal_device, program.torch_device, None, False, False
        )
        return variants

    def _storage(self, out: Sequence[Any] | None) -> dict[int, torch.Tensor]:
        """The tensor that each result with a storage argument is written into."""
        signature = self.program.signature
        if out is not None:
            out = slab.out_tensors(signature, out)
        if signature is None or not signature.storage or self._layout is None:
            return {}
        given = {} if out is None else {result: out[result] for result in signature.storage if out[result] is not None}
        for result, tensor in given.items():
            slab.check_out(signature, result, tensor, self.program.torch_device)
        if len(given) == len(signature.storage):
            return given
        if self.program.reuse_outputs:
            if self._static is None:
                self._static = self._layout.allocate_lasting()
            return self._static | given
        return self._layout.allocate() | given

    def _landing(self, tensor: torch.Tensor) -> rt.HalBufferView:
        """Memory of IREE's own that a result is written into, to be copied to the tensor afterwards.

        Memory that comes through DLPack may not be written by all programs: IREE grants it no discarding writes.
        """
        on_host = self.program.torch_device.type == "cpu"
        host = (rt.MemoryType.HOST_VISIBLE, rt.BufferUsage.MAPPING) if on_host else (0, 0)
        with devices.current(self.program.torch_device):
            buffer = self.program.hal_device.allocator.allocate_buffer(
                rt.MemoryType.DEVICE_LOCAL | host[0],
                rt.BufferUsage.DEFAULT | host[1],
                max(tensor.numel() * tensor.element_size(), 1),
            )
        return rt.HalBufferView(buffer, list(tensor.shape), HAL_OF[tensor.dtype])

    def _results(self, frame: Frame) -> list[Any]:
        program = self.program
        signature = program.signature
        if frame.outputs and signature is not None:
            returned: list[Any]
            if len(frame.results):
                returned = program.path.from_variant_list(frame.results, program.hal_device, False)
            else:
                # Functions of the torch dialect write into the storage and return nothing.
                written = rt.VmVariantList(len(frame.landings))
                for result in range(len(signature.results)):
                    written.push_ref(frame.landings[result])
                returned = program.path.from_variant_list(written, program.hal_device, False)
            for result, tensor in frame.outputs.items():
                slab.settle_result(signature, result, tensor, returned[result])
                returned[result] = tensor
            return returned
        found: list[Any] = program.path.from_variant_list(frame.results, program.hal_device, False)
        return found
