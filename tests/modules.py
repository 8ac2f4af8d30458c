# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Real modules for the tests: MLIR texts, compiled for the CPU once per text and compiler."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import iree.runtime as rt

IDENTITY = """
func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }
"""
ADD = """
func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %a, %b : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
# Two results of odd sizes, which IREE carves out of one allocation.
TWO_RESULTS = """
func.func @main(%a: tensor<7xf32>, %b: tensor<5xf32>) -> (tensor<7xf32>, tensor<5xf32>) {
  %0 = arith.addf %a, %a : tensor<7xf32>
  %1 = arith.mulf %b, %b : tensor<5xf32>
  return %0, %1 : tensor<7xf32>, tensor<5xf32>
}
"""
TWICE = """
func.func @main(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) { return %a, %a : tensor<4xf32>, tensor<4xf32> }
"""
# The accumulator is an argument: the compiled function may compute in its memory.
MATMUL_INTO_ARGUMENT = """
func.func @main(%a: tensor<8x8xf32>, %b: tensor<8x8xf32>, %c: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<8x8xf32>, tensor<8x8xf32>) outs(%c : tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}
"""
SCALARS = """
func.func @main(%i: i64, %x: f64) -> (i64, f64) {
  %0 = arith.addi %i, %i : i64
  %1 = arith.addf %x, %x : f64
  return %0, %1 : i64, f64
}
"""
SMALL_SCALARS = """
func.func @main(%i: i32, %x: f32) -> (i32, f32) { return %i, %x : i32, f32 }
"""
RANK_0 = """
func.func @main(%a: tensor<f32>) -> tensor<f32> {
  %0 = arith.addf %a, %a : tensor<f32>
  return %0 : tensor<f32>
}
"""
EMPTY_RESULT = """
func.func @main(%a: tensor<0x3xf32>, %b: tensor<4xf32>) -> (tensor<0x3xf32>, tensor<4xf32>) {
  %0 = arith.addf %a, %a : tensor<0x3xf32>
  %1 = arith.addf %b, %b : tensor<4xf32>
  return %0, %1 : tensor<0x3xf32>, tensor<4xf32>
}
"""
NOT = """
func.func @main(%a: tensor<4xi1>) -> tensor<4xi1> {
  %true = arith.constant dense<true> : tensor<4xi1>
  %0 = arith.xori %a, %true : tensor<4xi1>
  return %0 : tensor<4xi1>
}
"""
BFLOAT16 = """
func.func @main(%a: tensor<4xbf16>) -> tensor<4xbf16> {
  %0 = arith.addf %a, %a : tensor<4xbf16>
  return %0 : tensor<4xbf16>
}
"""
# Long enough that a list dropped right after an asynchronous call is dropped before the end.
SLOW = """
func.func @main(%a: tensor<512x512xf32>) -> tensor<512x512xf32> {
  %c0 = arith.constant 0.0 : f32
  %init = tensor.empty() : tensor<512x512xf32>
  %zero = linalg.fill ins(%c0 : f32) outs(%init : tensor<512x512xf32>) -> tensor<512x512xf32>
  %0 = linalg.matmul ins(%a, %a : tensor<512x512xf32>, tensor<512x512xf32>)
                     outs(%zero : tensor<512x512xf32>) -> tensor<512x512xf32>
  %1 = linalg.matmul ins(%0, %a : tensor<512x512xf32>, tensor<512x512xf32>)
                     outs(%zero : tensor<512x512xf32>) -> tensor<512x512xf32>
  return %1 : tensor<512x512xf32>
}
"""

_folder = Path(tempfile.gettempdir())


def use_folder(folder: Path) -> None:
    """Where compiled modules are kept during a session."""
    global _folder
    _folder = folder


CPU = ("--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=generic")
# PTX for an older architecture: the driver translates it for newer ones.
CUDA = ("--iree-hal-target-backends=cuda", "--iree-cuda-target=sm_89")


@functools.cache
def compile_module(text: str, *flags: str) -> bytes:
    """The vmfb of an MLIR text, compiled by `iree-compile`; for the CPU unless the flags name another target."""
    source = _folder / f"module_{abs(hash((text, flags)))}.mlir"
    source.write_text(text)
    target = source.with_suffix(".vmfb")
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    options = [*(() if CUDA[0] in flags else CPU), *flags]
    done = subprocess.run(
        [*command, str(source), "-o", str(target), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target.read_bytes()


class Program:
    """One function of one module on one device, called through iree.runtime's own `VmContext.invoke`."""

    def __init__(self, text: str, device: rt.HalDevice, function: str = "main", *flags: str) -> None:
        instance = rt.VmInstance()
        # A module belongs to the context that made it, so each program loads its own.
        self.module = rt.VmModule.copy_buffer(instance, compile_module(text, *flags))
        self.context = rt.VmContext(instance, modules=[rt.create_hal_module(instance, device), self.module])
        self.function = self.module.lookup_function(function)

    def invoke(self, arguments: rt.VmVariantList) -> rt.VmVariantList:
        results = rt.VmVariantList(4)
        self.context.invoke(self.function, arguments, results)
        return results
