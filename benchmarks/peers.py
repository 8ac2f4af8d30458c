# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Other ways from torch to native code and back, in the same rounds where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from benchmarks.calls import bare, sizes_of
from benchmarks.programs import FUNCTION, load
from iree_marshal.bench.cases import SHAPE, Fixture
from iree_marshal.bench.harness import Case

__all__ = ["peer_cases"]

INPUTS = 400
RESULTS = 450


def tvm_ffi_cases(fixture: Fixture) -> Iterator[Case]:
    """Time tvm-ffi's calls, which take torch tensors through the DLPack exchange API as we do."""
    tvm_ffi: Any = importlib.import_module("tvm_ffi")
    nop, echo = tvm_ffi.get_global_func("testing.nop"), tvm_ffi.get_global_func("testing.echo")
    tensors = fixture.tensors(INPUTS)
    yield Case(
        "peer.tvm_ffi.arguments",
        f"tvm-ffi: `nop` of {INPUTS} tensors",
        lambda: nop(*tensors),
        INPUTS,
        unlike="arguments only, nothing imported into a runtime",
        optional=True,
    )
    yield Case(
        "peer.tvm_ffi.echo",
        "tvm-ffi: `echo(t)`",
        lambda: [echo(tensor) for tensor in tensors],
        INPUTS,
        unlike="in and out, one call per tensor",
        optional=True,
    )


def identity_model() -> bytes:
    """Write an ONNX model that hands `INPUTS` tensors through to `RESULTS` results."""
    onnx: Any = importlib.import_module("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Identity", [f"in{place % INPUTS}"], [f"out{place}"]) for place in range(RESULTS)]
    inputs = [helper.make_tensor_value_info(f"in{place}", kind, SHAPE) for place in range(INPUTS)]
    results = [helper.make_tensor_value_info(f"out{place}", kind, SHAPE) for place in range(RESULTS)]
    graph = helper.make_graph(nodes, "identity", inputs, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def onnxruntime_cases(fixture: Fixture) -> Iterator[Case]:
    """Time onnxruntime's IOBinding: one call per tensor, names instead of positions."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    providers = ["CUDAExecutionProvider"] if fixture.cuda else ["CPUExecutionProvider"]
    missing = set(providers) - set(onnxruntime.get_available_providers())
    if missing:
        raise ImportError(f"onnxruntime has no {missing.pop()}")
    session = onnxruntime.InferenceSession(identity_model(), options, providers=providers)
    device, index = fixture.torch.type, fixture.torch.index or 0
    tensors = fixture.tensors(INPUTS)
    names = [f"in{place}" for place in range(INPUTS)]
    binding = session.io_binding()

    def bind() -> None:
        for name, tensor in zip(names, tensors, strict=True):
            binding.bind_input(name, device, index, np.float32, tuple(tensor.shape), tensor.data_ptr())

    bind()
    for place in range(RESULTS):
        binding.bind_output(f"out{place}", device, index)
    session.run_with_iobinding(binding)
    raw = binding._iobinding
    yield Case(
        "peer.onnxruntime.bind_input",
        "onnxruntime: `bind_input`",
        bind,
        INPUTS,
        unlike="binds by name, nothing to destroy",
        optional=True,
    )
    yield Case(
        "peer.onnxruntime.outputs",
        "onnxruntime: raw `get_outputs`, `from_dlpack`",
        lambda: [from_dlpack(value.to_dlpack()) for value in raw.get_outputs()],
        RESULTS,
        optional=True,
    )


def turbine_cases(fixture: Fixture) -> Iterator[Case]:
    """Time iree-turbine's launcher on a program that our own calls are timed on as well."""
    runtime: Any = importlib.import_module("iree.turbine.runtime")
    module: Any = importlib.import_module("iree.runtime").VmModule
    count = sizes_of(fixture).arguments[-1]
    program, tensors = load(fixture, count, 1, storage=False), fixture.tensors(count)
    launch = runtime.Launchable.from_vm_module(
        lambda device: module.copy_buffer(device.vm_instance, program.module), entry_point=FUNCTION
    )
    if not torch.equal(launch(*tensors), tensors[0] + tensors[1]):
        raise RuntimeError("iree-turbine's result is wrong")
    yield bare("peer.turbine.bare", program, fixture, tensors)
    yield Case(
        "peer.turbine.launch",
        f"iree-turbine: `Launchable`, {count} in, 1 out",
        lambda: launch(*tensors),
        1,
        "call",
        unlike="copies every argument",
        over="peer.turbine.bare",
        optional=True,
    )


def peer_cases(fixture: Fixture, skipped: dict[str, str]) -> Iterator[Case]:
    """Yield the cases of every peer that is installed.

    Parameters
    ----------
    fixture : Fixture
        Devices and tensors.
    skipped : dict
        Takes the reasons why a peer is left out.
    """
    for name, cases in (
        ("peer.tvm_ffi", tvm_ffi_cases),
        ("peer.onnxruntime", onnxruntime_cases),
        ("peer.turbine", turbine_cases),
    ):
        try:
            yield from cases(fixture)
        except Exception as error:  # a peer may fail in ways of its own, which is no fault of ours
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
