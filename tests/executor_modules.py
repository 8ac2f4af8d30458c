# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs for the tests of `Executor`, compiled once per process."""

from __future__ import annotations

from modules import compile_module

FENCES = "--iree-execution-model=async-external"
WIDE = "--iree-input-demote-f64-to-f32=false"

ADD = """
func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %a, %b : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""

DYNAMIC = """
func.func @main(%a: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %0 = arith.addf %a, %a : tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
}"""

SUM_ROWS = """
func.func @main(%a: tensor<?x4xf32>, %b: tensor<4xf32>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %a, %c0 : tensor<?x4xf32>
  %e = tensor.empty(%rows) : tensor<?x4xf32>
  %0 = linalg.broadcast ins(%b : tensor<4xf32>) outs(%e : tensor<?x4xf32>) dimensions = [0]
  %1 = arith.addf %a, %0 : tensor<?x4xf32>
  return %1 : tensor<?x4xf32>
}"""

NARROW_FLOAT = "func.func @main(%x: f32, %n: i32) -> (f32, i32) { return %x, %n : f32, i32 }"

SCALARS = """
func.func @main(%i: i32, %l: i64, %f: f32, %d: f64, %b: i1) -> (i32, i64, f32, f64, i1) {
  return %i, %l, %f, %d, %b : i32, i64, f32, f64, i1
}"""

NAMED = """
func.func @main(%a: tensor<4xf32> {iree.abi.name = "x"}, %b: tensor<2x?xi32> {iree.abi.name = "weight.0"},
                %s: f32 {iree.abi.name = "scale"})
    -> (tensor<4xf32> {iree.abi.name = "y"}) {
  return %a : tensor<4xf32>
}"""

NOTHING = "func.func @main() { return }"
NO_RESULT = "func.func @main(%a: tensor<4xf32>) { return }"

TWICE = """
func.func @main(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  return %a, %a : tensor<4xf32>, tensor<4xf32>
}"""

ODD_SIZES = """
func.func @main(%a: tensor<5xf32>) -> (tensor<5xf32>, tensor<5x3xf32>) {
  %one = arith.constant dense<1.0> : tensor<5xf32>
  %0 = arith.addf %a, %one : tensor<5xf32>
  %e = tensor.empty() : tensor<5x3xf32>
  %1 = linalg.broadcast ins(%a : tensor<5xf32>) outs(%e : tensor<5x3xf32>) dimensions = [1]
  return %0, %1 : tensor<5xf32>, tensor<5x3xf32>
}"""

# Results of three dtypes in one allocation of IREE's.
MANY_RESULTS = """
func.func @main(%a: tensor<5xf32>) -> (tensor<5xf32>, tensor<5xi64>, tensor<5xf32>, tensor<5xi8>, tensor<5xi64>) {
  %0 = arith.addf %a, %a : tensor<5xf32>
  %1 = arith.fptosi %a : tensor<5xf32> to tensor<5xi64>
  %2 = arith.mulf %a, %a : tensor<5xf32>
  %3 = arith.fptosi %a : tensor<5xf32> to tensor<5xi8>
  %4 = arith.addi %1, %1 : tensor<5xi64>
  return %0, %1, %2, %3, %4 : tensor<5xf32>, tensor<5xi64>, tensor<5xf32>, tensor<5xi8>, tensor<5xi64>
}"""

MIXED_RESULTS = """
func.func @main(%a: tensor<4xf32>, %n: i64) -> (tensor<4xf32>, i64) {
  %0 = arith.addf %a, %a : tensor<4xf32>
  return %0, %n : tensor<4xf32>, i64
}"""

LISTS = """
func.func @main(%l: !util.list<?>, %v: !hal.buffer_view) -> (!util.list<?>, !hal.buffer_view) {
  return %l, %v : !util.list<?>, !hal.buffer_view
}"""

UNSIGNED = """
func.func @main(%a: tensor<4xi8>) -> tensor<4xi8> {
  %0 = arith.addi %a, %a : tensor<4xi8>
  return %0 : tensor<4xi8>
}"""

SUB_BYTE = """
func.func @main(%a: tensor<4xi8>) -> tensor<4xi4> {
  %0 = arith.trunci %a : tensor<4xi8> to tensor<4xi4>
  return %0 : tensor<4xi4>
}"""

# Fails inside IREE when the argument is not 1.
ASSERTING = """
func.func @main(%a: tensor<4xf32>, %n: i32) -> tensor<4xf32> {
  %one = arith.constant 1 : i32
  %ok = arith.cmpi eq, %n, %one : i32
  cf.assert %ok, "n must be 1"
  %0 = arith.addf %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""

# Accumulates into the memory of its third argument.
ACCUMULATE = """
func.func @main(%a: tensor<4x4xf32>, %b: tensor<4x4xf32>, %acc: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<4x4xf32>, tensor<4x4xf32>) outs(%acc : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}"""

# Results 0 (f32) and 1 (i32) into storage; {0} is the storage's type.
STORAGE = """
func.func @main(%a: tensor<4xf32> {{iree.abi.name = "x"}}, %s: {0} {{iree.abi.output = 0 : index}},
                %t: {0} {{iree.abi.output = 1 : index}})
    -> (tensor<4xf32> {{iree.abi.name = "y"}}, tensor<4xi32> {{iree.abi.name = "z"}}) {{
  %0 = arith.addf %a, %a : tensor<4xf32>
  %1 = arith.fptosi %0 : tensor<4xf32> to tensor<4xi32>
  return %0, %1 : tensor<4xf32>, tensor<4xi32>
}}"""
STORAGE_BUFFER = STORAGE.format("!hal.buffer")
STORAGE_VIEW = STORAGE.format("!hal.buffer_view")

# Both results alike, for overlaps of equal dtypes.
STORAGE_PAIR = """
func.func @main(%a: tensor<16xf32>, %s: !hal.buffer {iree.abi.output = 0 : index},
                %t: !hal.buffer {iree.abi.output = 1 : index}) -> (tensor<16xf32>, tensor<16xf32>) {
  %0 = arith.addf %a, %a : tensor<16xf32>
  %1 = arith.mulf %0, %a : tensor<16xf32>
  return %0, %1 : tensor<16xf32>, tensor<16xf32>
}"""

LARGE_STORAGE = STORAGE_PAIR.replace("16xf32", "1048576xf32")

STORAGE_DYNAMIC = """
func.func @main(%a: tensor<?xf32>, %s: !hal.buffer {iree.abi.output = 0 : index}) -> tensor<?xf32> {
  %0 = arith.addf %a, %a : tensor<?xf32>
  return %0 : tensor<?xf32>
}"""

# Only the second result has storage.
STORAGE_SECOND = """
func.func @main(%a: tensor<4xf32>, %s: !hal.buffer {iree.abi.output = 1 : index}) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = arith.addf %a, %a : tensor<4xf32>
  %1 = arith.mulf %0, %a : tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}"""

# A result that is an argument: IREE returns the argument's buffer, whatever storage it was given.
STORAGE_PASSTHROUGH = """
func.func @main(%a: tensor<4xf32>, %s: !hal.buffer {iree.abi.output = 0 : index}) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}"""

# Takes storage and never writes into it, whatever its signature claims.
IGNORES_STORAGE = """
func.func @main(%a: tensor<4xf32>, %s: !hal.buffer_view) -> tensor<4xf32> {
  %0 = arith.addf %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""
IGNORES_STORAGE_SIGNATURE = (
    "func @main(%a: tensor<4xf32>, %s: !hal.buffer_view {iree.abi.output = 0 : index}) -> (%y: tensor<4xf32>)"
)

# The torch dialect: no reflection, an entry with fences beside the synchronous one.
TORCH_ADD = """
func.func @main(%a: !torch.vtensor<[4],f32>, %b: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  %one = torch.constant.int 1
  %0 = torch.aten.add.Tensor %a, %b, %one
    : !torch.vtensor<[4],f32>, !torch.vtensor<[4],f32>, !torch.int -> !torch.vtensor<[4],f32>
  return %0 : !torch.vtensor<[4],f32>
}"""
TORCH_ADD_SIGNATURE = "func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (%sum: tensor<4xf32>)"

# The torch dialect's kind of storage: an argument that is overwritten, and nothing returned.
TORCH_STORAGE = """
func.func @main(%a: !torch.vtensor<[4],f32>, %out: !torch.tensor<[4],f32>) {
  %one = torch.constant.int 1
  %0 = torch.aten.add.Tensor %a, %a, %one
    : !torch.vtensor<[4],f32>, !torch.vtensor<[4],f32>, !torch.int -> !torch.vtensor<[4],f32>
  torch.overwrite.tensor.contents %0 overwrites %out : !torch.vtensor<[4],f32>, !torch.tensor<[4],f32>
  return
}"""
TORCH_STORAGE_SIGNATURE = (
    "func @main(%a: tensor<4xf32>, %s: tensor<4xf32> {iree.abi.output = 0 : index}) -> (%y: tensor<4xf32>)"
)

# Keeps the CPU busy for a while.
SLOW = """
func.func @main(%a: tensor<512x512xf32>) -> tensor<512x512xf32> {
  %zero = arith.constant 0.0 : f32
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = arith.constant 20 : index
  %r = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a) -> tensor<512x512xf32> {
    %e = tensor.empty() : tensor<512x512xf32>
    %f = linalg.fill ins(%zero : f32) outs(%e : tensor<512x512xf32>) -> tensor<512x512xf32>
    %m = linalg.matmul ins(%x, %a : tensor<512x512xf32>, tensor<512x512xf32>) outs(%f : tensor<512x512xf32>)
      -> tensor<512x512xf32>
    scf.yield %m : tensor<512x512xf32>
  }
  return %r : tensor<512x512xf32>
}"""

PARAMETERS = """
util.global private @w = #flow.parameter.named<{0}"w"> : tensor<4xf32>
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
  %w = util.global.load @w : tensor<4xf32>
  %0 = arith.addf %a, %w : tensor<4xf32>
  return %0 : tensor<4xf32>
}}"""

COUNTER = """
util.global private mutable @n = 0 : i64
func.func @main() -> i64 {
  %one = arith.constant 1 : i64
  %0 = util.global.load @n : i64
  %1 = arith.addi %0, %one : i64
  util.global.store %1, @n : i64
  return %1 : i64
}"""


def compiled(program: str, *flags: str) -> bytes:
    """The module of a program, compiled for the CPU."""
    return compile_module(program, "--iree-input-type=auto", *flags)
