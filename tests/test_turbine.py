# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""iree-turbine's launcher and compile backend with our crossing; needs iree-turbine 3.9.0 beside this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

launch = pytest.importorskip("iree.turbine.runtime.launch", reason="iree-turbine is not installed")

from iree_marshal import turbine  # noqa: E402  (only where turbine is)

_ADD = """
func.func @main(%arg0: !torch.vtensor<[4,4],f32>, %arg1: !torch.vtensor<[4,4],f32>)
    -> (!torch.vtensor<[4,4],f32>, !torch.vtensor<[4,4],f32>) {
  %int1 = torch.constant.int 1
  %0 = torch.aten.add.Tensor %arg0, %arg1, %int1
      : !torch.vtensor<[4,4],f32>, !torch.vtensor<[4,4],f32>, !torch.int -> !torch.vtensor<[4,4],f32>
  %1 = torch.aten.mul.Tensor %arg0, %arg1
      : !torch.vtensor<[4,4],f32>, !torch.vtensor<[4,4],f32> -> !torch.vtensor<[4,4],f32>
  return %0, %1 : !torch.vtensor<[4,4],f32>, !torch.vtensor<[4,4],f32>
}
"""
_COUNT = """
func.func @main(%arg0: i64, %arg1: !torch.vtensor<[2],f32>) -> (i64, !torch.vtensor<[2],f32>) {
  %0 = arith.addi %arg0, %arg0 : i64
  %1 = torch.aten.neg %arg1 : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
  return %0, %1 : i64, !torch.vtensor<[2],f32>
}
"""


def _compile(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="iree_turbine")


def test_it_launches_and_is_undone() -> None:
    call = launch.Launchable.__call__
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    program = launch.Launchable.jit_compile(_ADD)
    before = program(x, y)
    with turbine.accelerate():
        assert launch.Launchable.__call__ is not call
        ours = program(x, y)
        assert torch.equal(ours[0], x + y)
        assert torch.equal(ours[1], x * y)
        # Each way has loaded the program on its own device, and both still work side by side.
        with turbine.accelerate(copy=True):
            assert torch.equal(program(x, y)[0], x + y)
        assert torch.equal(program(x, y)[0], x + y)
    assert launch.Launchable.__call__ is call
    assert torch.equal(program(x, y)[0], before[0])


def test_a_second_undo_does_nothing() -> None:
    call = launch.Launchable.__call__
    first, second = turbine.accelerate(), turbine.accelerate()
    first.undo()
    first.undo()
    assert launch.Launchable.__call__ is not call
    second.undo()
    assert launch.Launchable.__call__ is call


def test_outputs_are_written() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    program = launch.Launchable.jit_compile(_ADD)
    outputs = [torch.zeros(4, 4), torch.zeros(4, 4)]
    with turbine.accelerate():
        returned = program(x, y, outputs=outputs)
        assert returned[0] is outputs[0]
        assert torch.equal(outputs[0], x + y)
        assert torch.equal(outputs[1], x * y)
        with pytest.raises(ValueError, match="outputs: expected 2 tensors, one per result, got 1"):
            program(x, y, outputs=outputs[:1])


def test_integer_results_keep_their_place() -> None:
    with turbine.accelerate():
        count, negative = launch.Launchable.jit_compile(_COUNT)(21, torch.ones(2))
    assert count == 42
    assert torch.equal(negative, -torch.ones(2))


def test_arguments_cross_in_place_and_results_too() -> None:
    """A program that hands its argument back returns the argument's own memory."""
    text = """func.func @main(%arg0: !torch.vtensor<[64],f32>) -> !torch.vtensor<[64],f32> {
      return %arg0 : !torch.vtensor<[64],f32>
    }"""
    storage = torch.randn(128)
    x = storage[(-storage.data_ptr() % 64) // 4 :][:64]
    with turbine.accelerate():
        assert launch.Launchable.jit_compile(text)(x).data_ptr() == x.data_ptr()
    with turbine.accelerate(copy=True):
        assert launch.Launchable.jit_compile(text)(x).data_ptr() != x.data_ptr()


def test_no_tensor_and_no_device_is_refused() -> None:
    with turbine.accelerate(), pytest.raises(RuntimeError, match=r"without any Tensor args or an explicit device="):
        launch.Launchable.jit_compile(_COUNT)(1, None)


def test_its_compile_backend_runs_models_and_every_float() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8)
    with turbine.accelerate(), torch.no_grad():
        torch.testing.assert_close(_compile(layers)(x), layers(x))
        run = _compile(lambda x, s: x * s)
        for scale in (2.0, 3.0, -0.5):
            torch.testing.assert_close(run(x, scale), x * scale)
        torch.testing.assert_close(_compile(lambda x: x + 0.1)(x.double()), x.double() + 0.1)


def test_its_compiled_graphs_do_not_write_into_their_inputs() -> None:
    x, rows = torch.randn(16, 64), torch.tensor([1, 3])
    before = x.clone()
    with turbine.accelerate():
        ours = _compile(lambda x, i, v: x.index_put((i,), v))(x, rows, torch.zeros(2, 64))
    assert torch.equal(x, before)
    assert torch.equal(ours, x.index_put((rows,), torch.zeros(2, 64)))
