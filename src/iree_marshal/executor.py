# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`Executor`: one call per invocation."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import iree.runtime as rt
import torch

from iree_marshal import arguments, devices, inputs, loading, memory, paths
from iree_marshal.calling import PortableEngine, Program, Timing
from iree_marshal.pending import FencePending, Pending, ThreadPending
from iree_marshal.signature import Signature, SignatureError, parse
from iree_marshal.slab import Layout

__all__ = ["Executor"]

DeviceLike: TypeAlias = torch.device | str | rt.HalDevice
_FENCES_MODEL = "coarse-fences"
_ASYNC_SUFFIX = "$async"


class Executor:
    """Calls a compiled function with torch tensors.

    Parameters
    ----------
    context : iree.runtime.VmContext
        With the function's module loaded.
    function : iree.runtime.VmFunction
        The function. One that takes fences (``--iree-execution-model=async-external``, or a ``$async`` entry) is waited
        for by a call, and not by `submit`.
    device : torch.device, str or iree.runtime.HalDevice
        Where the context runs and tensors must be.
    signature : str or Signature, optional
        What the function takes and returns, in the grammar of ``iree.abi.declaration``. By default what the function's
        reflection says; functions that come through the torch importer say nothing, and then only IREE itself checks
        what is passed.
    async_function : iree.runtime.VmFunction, optional
        The entry of the same function that takes fences, for `submit`. Without one, `submit` runs `function` on a
        worker thread.
    copy : bool, optional
        Of argument tensors, as in `to_variant_list`. A compiled function may write into the memory of its arguments,
        and a result may be an argument's memory: ``copy=True`` protects from both.
    upload : bool
        Copy CPU tensors to a CUDA device instead of refusing them.
    reuse_outputs : bool
        Keep one allocation for the results of all calls, like the static outputs of a CUDA graph: every call returns
        the same tensors, and overwrites what they held. Needs storage arguments for all results.
    serialize : bool
        Let one call of this executor at a time into IREE; for programs with state. Implied by `reuse_outputs`.
    timing : bool
        Measure each call; see `last_timing`.

    Attributes
    ----------
    timing : bool
        May be switched at any time.

    Raises
    ------
    ValueError
        ``reuse_outputs=True`` of a function without storage arguments, or whose results have no static shape.
    SignatureError
        `signature` is not in the grammar.

    Notes
    -----
    *Arguments* are checked against the signature before anything runs: a wrong number is a `TypeError`, a wrong dtype,
    shape, device or value a `ValueError`. A call that fails leaves nothing behind and the executor usable. Tensors that
    lie where those of the call before lay, position by position, cost only the look; the last call's arguments are kept
    alive until the next one (or `trim`).

    *Results* are one tensor or number, a tuple of several, or `None` for none. Where the function declares storage
    arguments (``iree.abi.output``), each call makes one torch allocation for all of its results, which start at
    multiples of 256 bytes; ``out=`` takes the caller's tensors instead.

    *Threads.* One executor may be called from many threads at once; there is no lock around a call: each call has its
    own argument and result lists, and the GIL is free while IREE works. Only the last call to return leaves its
    arguments behind to be recognised, so threads that share an executor should `bind` their weights. A program that
    writes global state needs ``serialize=True``.

    *Fork.* In a process that was forked after the first use, calls raise `RuntimeError`.

    Examples
    --------
    >>> import torch, iree_marshal as im
    >>> exe = im.Executor.load("model.vmfb", device="cpu")
    >>> exe.bind({1: weight})
    >>> y = exe(x)
    """

    def __init__(
        self,
        context: rt.VmContext,
        function: rt.VmFunction,
        *,
        device: DeviceLike,
        signature: str | Signature | None = None,
        async_function: rt.VmFunction | None = None,
        copy: bool | None = None,
        upload: bool = False,
        reuse_outputs: bool = False,
        serialize: bool = False,
        timing: bool = False,
    ) -> None:
        if copy is not None and not isinstance(copy, bool):
            raise TypeError(f"copy: expected None, True or False, got {copy!r}")
        path = paths.active()
        hal_device, torch_device = devices.resolve(device)
        declared = _signature_of(function, signature)
        self._context = context
        self._hal_device = hal_device
        self._torch_device = torch_device
        self._signature = declared
        self._name = function.name
        layout = None
        if declared is not None and declared.storage:
            layout = Layout(declared, torch_device)
        if reuse_outputs:
            _check_reusable(declared, layout)

        def engine(entry: rt.VmFunction, fences: bool) -> Any:
            program = Program(
                invoke=context.invoke if declared is not None else _counted(context),
                function=entry,
                hal_device=hal_device,
                torch_device=torch_device,
                signature=declared,
                fences=fences,
                copy=copy,
                upload=upload,
                reuse_outputs=reuse_outputs,
                path=path,
            )
            return _engine_class(path)(program, layout)

        self._fences = _has_fences(function, declared)
        self._engine = engine(function, self._fences)
        self._async_engine = self._engine if self._fences else None
        if async_function is not None and not self._fences:
            # Fences are passed to it whatever it is: the list needs room for them, and IREE refuses what takes none.
            self._async_engine = engine(async_function, True)
        self._check_inputs = inputs.wanted()
        self._lock: AbstractContextManager[Any] | None = None
        if serialize or reuse_outputs:
            self._lock = threading.RLock()
        self._workers: concurrent.futures.ThreadPoolExecutor | None = None
        self._ready: rt.HalFence | None = None
        # A call that needs none of the above goes straight to the engine.
        self._direct = not self._fences and not self._check_inputs and self._lock is None
        self.timing = timing

    @classmethod
    def load(
        cls,
        vmfb: str | os.PathLike[str] | bytes | bytearray | memoryview,
        function: str = "main",
        device: DeviceLike = "cpu",
        parameters: loading.Parameters | None = None,
        **options: Any,
    ) -> Executor:
        """Load a compiled module.

        Parameters
        ----------
        vmfb : path or bytes
            A file is mapped into memory and must stay as it is; bytes are copied.
        function : str
            The exported function; its ``$async`` entry, if there is one, serves `submit`.
        device : torch.device, str or iree.runtime.HalDevice
            Where it runs.
        parameters : path, mapping, iree.runtime.ParameterIndex, iree.runtime.ParameterProvider, or list of these
            Archives of the module's parameters (``.irpa``, ``.safetensors``, ``.gguf``), mapped by IREE. A path is
            offered under the scopes ``""`` and ``"model"``; a mapping names the scope of each path.
        **options
            As for `Executor`.

        Raises
        ------
        ValueError
            No such function; or what IREE says of a module it cannot load.
        """
        hal_device, _ = devices.resolve(device)
        context, program = loading.load_context(vmfb, hal_device, parameters)
        entry, beside = loading.function_of(program, function)
        return cls(context, entry, device=hal_device, **{"async_function": beside, **options})

    # ---- what it is --------------------------------------------------------------------------

    @property
    def signature(self) -> Signature | None:
        """What the function takes and returns; `None` where nobody said so."""
        return self._signature

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._torch_device

    @property
    def timing(self) -> bool:
        """Whether calls are measured."""
        return bool(self._engine.timing)

    @timing.setter
    def timing(self, on: bool) -> None:
        self._engine.timing = bool(on)
        if self._async_engine is not None:
            self._async_engine.timing = bool(on)

    @property
    def last_timing(self) -> Timing | None:
        """How long the steps of the last measured call took, in nanoseconds; `None` before there was one.

        What `submit` starts through an entry of its own (``async_function``) is not among them.
        """
        timing: Timing | None = self._engine.last_timing
        return timing

    def __repr__(self) -> str:
        shown = self._name if self._signature is None else str(self._signature)
        return f"Executor({shown} on {self._torch_device})"

    # ---- calls ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, out: Sequence[torch.Tensor | None] | None = None) -> Any:
        """Invoke the function and return its results.

        Parameters
        ----------
        *args
            The function's arguments except the bound ones and the storage arguments: what `to_variant_list` takes.
        out : sequence of torch.Tensor, optional
            One tensor per result to write into, or `None` for a result that shall get new memory. Only for functions
            that declare storage arguments. Each must have the result's dtype and shape, be contiguous, aligned to 64
            bytes, and overlap neither another one nor an argument.

        Returns
        -------
        torch.Tensor, int, float, list, tuple or None
            One result as it is, several as a tuple, `None` for none; ready to be used.

        Raises
        ------
        TypeError
            A wrong number of arguments, or one of a class that cannot be passed.
        ValueError
            An argument of the wrong dtype, shape, device or value; an `out` that cannot be written into.
        RuntimeError
            In a forked process, and what IREE fails with (its statuses raise the classes of `iree.runtime`).
        """
        if self._direct:
            return self._engine.call(args, out)
        with self._lock or contextlib.nullcontext():
            if self._fences:
                return self._submit_fences(args, out).result()
            watch = self._watch(args)
            results = self._engine.call(args, out)
            if watch is not None:
                watch.report()
            return results

    def submit(self, *args: Any, out: Sequence[torch.Tensor | None] | None = None) -> Pending:
        """Start the function and return before its work is done.

        Arguments are checked, imported and ordered here, on the calling thread and its stream; they may be dropped but
        not changed until the work is done. With an entry that takes fences the work then runs in IREE; without one on
        a worker thread of this executor, one call after the other in the order they were submitted.

        Parameters
        ----------
        *args, out
            As for a call.

        Returns
        -------
        Pending
            ``.done()`` and ``.result()``.

        Raises
        ------
        TypeError, ValueError
            As a call; what the work itself fails with is raised by ``.result()``.
        """
        if self._async_engine is not None:
            return self._submit_fences(args, out)
        engine = self._engine
        watch = self._watch(args)
        with self._lock or contextlib.nullcontext():
            # The outputs of reuse_outputs are made by the first call.
            frame = engine.prepare(args, out)

        def work() -> Any:
            try:
                with self._lock or contextlib.nullcontext():
                    engine.run(frame)
                    results = engine.collect(frame)
            except BaseException:
                engine.abandon(frame)
                raise
            if watch is not None:
                watch.report()
            return results

        return ThreadPending(self._worker().submit(work))

    def _submit_fences(self, args: tuple[Any, ...], out: Sequence[torch.Tensor | None] | None) -> Pending:
        engine: Any = self._async_engine
        watch = self._watch(args)
        if self._ready is None:
            # Already signaled: the order after torch's stream is made on the device.
            self._ready = rt.HalFence.create_at(self._hal_device.create_semaphore(1), 1)
        signal = rt.HalFence.create_at(self._hal_device.create_semaphore(0), 1)
        frame = engine.prepare(args, out, (self._ready, signal))
        try:
            engine.run(frame)
        except BaseException:
            engine.abandon(frame)
            raise

        def collect() -> Any:
            results = engine.collect(frame)
            if watch is not None:
                watch.report()
            return results

        return FencePending(signal, collect, lambda: engine.abandon(frame))

    def _worker(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._workers is None:
            workers = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="iree_marshal")
            if self._workers is None:
                self._workers = workers
        return self._workers

    def _watch(self, args: tuple[Any, ...]) -> inputs.InputWatch | None:
        """Remember the bytes of all tensors of a call, where ``IREE_MARSHAL_CHECK_INPUTS=1`` was set."""
        if not self._check_inputs:
            return None
        given = dict(self._engine.bound())
        declared = self._signature
        count = len(args) + len(given)
        taken = range(count) if declared is None else declared.inputs
        open_places = [index for index in taken if index not in given]
        if len(open_places) == len(args):
            given.update(zip(open_places, args, strict=True))
        tensors = {}
        for index, value in sorted(given.items()):
            if isinstance(value, torch.Tensor):
                expected = None if declared is None else declared.arguments[index]
                tensors[arguments.place_of(index, expected)] = value
        return inputs.InputWatch(self._name, tensors)

    # ---- fixed arguments -----------------------------------------------------------------------

    def bind(self, fixed: Mapping[int, Any]) -> None:
        """Fix arguments, weights above all, for all calls to come; they cost nothing per call and are passed no more.

        Parameters
        ----------
        fixed : mapping of int to value
            By the argument's index in the signature. Fixing an index again replaces its value.

        Raises
        ------
        TypeError, ValueError
            As a call, and for an index that the function does not have; then nothing is bound.

        Notes
        -----
        A tensor's memory is used as it is: what is written into it later is seen by later calls. A tensor that had to
        be copied to be passed (see ``copy``) is copied once, here. The tensor object may be dropped or given other
        memory (``t.data = ...``); the executor goes on with the memory that was bound.
        """
        for index in fixed:
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"bind: expected the index of an argument, got {index!r}")
            if index < 0 or (self._signature is not None and index not in self._signature.inputs):
                raise ValueError(f"bind: the function takes no argument {index} from its caller")
        for engine in self._engines():
            engine.bind(fixed)

    def unbind(self, indices: Iterable[int] | None = None) -> None:
        """Take arguments again from the caller; by default all bound ones.

        Raises
        ------
        ValueError
            An index that is not bound; then nothing changes.
        """
        bound = self._engine.bound()
        chosen = list(bound) if indices is None else list(indices)
        for index in chosen:
            if index not in bound:
                raise ValueError(f"unbind: argument {index} is not bound")
        for engine in self._engines():
            engine.unbind(chosen)

    def _engines(self) -> list[Any]:
        if self._async_engine is None or self._async_engine is self._engine:
            return [self._engine]
        return [self._engine, self._async_engine]

    # ---- memory ----------------------------------------------------------------------------------

    def trim(self) -> None:
        """Let go of what is kept for the next call, and have IREE's allocator give unused memory back.

        Bound arguments and the outputs of ``reuse_outputs=True`` stay.
        """
        devices.check_not_forked()
        for engine in self._engines():
            engine.trim()
        memory.trim_device(self._hal_device)


def _counted(context: rt.VmContext) -> Callable[[rt.VmFunction, rt.VmVariantList, rt.VmVariantList], None]:
    """The context's `invoke`, where only IREE knows how many arguments there are: a wrong number is a `TypeError`."""

    def invoke(function: rt.VmFunction, passed: rt.VmVariantList, results: rt.VmVariantList) -> None:
        try:
            context.invoke(function, passed, results)
        except ValueError as error:
            if "input list and function mismatch" in str(error):
                raise TypeError(str(error)) from None
            raise

    return invoke


def _engine_class(path: Any) -> Any:
    if path.__name__ == "iree_marshal.native":
        from iree_marshal._executor import NativeEngine

        return NativeEngine
    return PortableEngine


def _signature_of(function: rt.VmFunction, given: str | Signature | None) -> Signature | None:
    if isinstance(given, Signature):
        return given
    if given is not None:
        return parse(given)
    declaration = function.reflection.get("iree.abi.declaration")
    if declaration is None:
        return None
    try:
        return parse(declaration)
    except SignatureError:
        # Frontends may put any text of their own there.
        return None


def _has_fences(function: rt.VmFunction, signature: Signature | None) -> bool:
    return (
        function.name.endswith(_ASYNC_SUFFIX)
        or function.reflection.get("iree.abi.model") == _FENCES_MODEL
        or (signature is not None and signature.fences)
    )


def _check_reusable(signature: Signature | None, layout: Layout | None) -> None:
    if signature is None or layout is None:
        raise ValueError("reuse_outputs=True: the function declares no storage arguments (iree.abi.output)")
    if len(signature.storage) != len(signature.results):
        missing = next(result for result in range(len(signature.results)) if result not in signature.storage)
        raise ValueError(
            f"reuse_outputs=True: result {missing} ({signature.results[missing].name}) has no storage argument"
        )
    if layout.missing:
        raise ValueError(f"reuse_outputs=True: {layout.missing}")
