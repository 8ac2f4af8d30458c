# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The grammar of ``iree.abi.declaration``, and what may be passed for each type."""

from __future__ import annotations

import enum
import math

import executor_modules as modules
import iree.runtime as rt
import numpy as np
import pytest
import releases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iree_marshal import devices
from iree_marshal.signature import OpaqueType, ScalarType, Signature, SignatureError, TensorType, Value, parse

WRITTEN_BY_THE_COMPILER = [
    "sync func @main() -> ()",
    "sync func @main(%input0: tensor<2x?xi1>) -> (%output0: tensor<2x?xi1>)",
    "sync func @main(%input0: tensor<?x?xcomplex<f32>>) -> (%output0: tensor<f64>)",
    "sync func @main(%input0: tensor<0x3xf32>, %input1: tensor<f32>) -> (%output0: tensor<0x3xf8E4M3FNUZ>)",
    "sync func @main(%input0: i32, %input1: index, %input2: f64, %input3: ui8) -> (%output0: si8, %output1: bf16)",
    "sync func @main(%my input: x, (y): tensor<4xf32>, %weight.0: tensor<4xf32>) -> (%out: tensor<4xf32>)",
    "sync func @we ird(x)(%input0: tensor<4xf32>) -> (%output0: tensor<4xf32>)",
    "async func @main(%a: tensor<4xf32>, %b: !hal.buffer {iree.abi.output = 0 : index}) -> (%output0: tensor<4xf32>)",
    "sync func @main(%a: !hal.buffer_view, %b: !util.list<?>, %c: !util.buffer) -> (%output0: vector<4xf32>)",
    "sync func @main(%a: tensor<4xf32> {iree.abi.encoding = tensor<4xi32>}) -> (%output0: tensor<4xf32>)",
    'sync func @main(%a: tensor<4xf32, #x.y<[1, 2], {a = "}>"}>> {b.c = "x, }y", d = [1, {e = 2}]}) -> (%o: i4)',
    "sync func @main(%a: tensor<4xf32> {iree.abi.affinity = #hal.device.promise<@dev>}) -> (%o: tensor<4xf32>)",
    "sync func @main(%a: !hal.buffer {iree.abi.transients = unit}) -> (%o: tensor<4xindex>)",
    "sync func @main(%f: !util.list<() -> i32>, %g: tensor<?xi64>) -> (%o: i64)",
]


@pytest.mark.parametrize("text", WRITTEN_BY_THE_COMPILER)
def test_round_trip(text: str) -> None:
    assert str(parse(text)) == text


def test_parts() -> None:
    signature = parse(
        "async func @run(%x: tensor<?x4xf32>, %n: i64, %s: !hal.buffer {iree.abi.output = 1 : index}, "
        "%l: !util.list<?>) -> (%y: f32, %z: tensor<2xi8>)"
    )
    assert signature.name == "run"
    assert signature.fences
    assert [value.name for value in signature.arguments] == ["x", "n", "s", "l"]
    assert signature.arguments[0].type == TensorType("f32", (None, 4))
    assert not signature.arguments[0].type.static
    assert signature.arguments[1].type == ScalarType("i64")
    assert signature.arguments[2].type == OpaqueType("!hal.buffer")
    assert signature.arguments[3].type == OpaqueType("!util.list<?>")
    assert signature.results[1].type == TensorType("i8", (2,))
    assert signature.results[1].type.static
    assert signature.storage == {1: 2}
    assert signature.inputs == (0, 1, 3)
    assert signature.arguments[2].output == 1
    assert signature.arguments[0].output is None


def test_without_sync_and_with_odd_spaces() -> None:
    assert parse(" func@main( %a :tensor<4xf32>{ x=1 },%b:i32)->( ) ") == parse(
        "sync func @main(%a: tensor<4xf32> {x = 1}, %b: i32) -> ()"
    )


def test_encoding_is_what_crosses() -> None:
    value = parse("func @f(%a: tensor<4xf32> {iree.abi.encoding = tensor<4xi32>}) -> ()").arguments[0]
    assert value.type == TensorType("f32", (4,))
    assert value.abi_type == TensorType("i32", (4,))
    assert Value("a", ScalarType("i32")).abi_type == ScalarType("i32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "signature, position 0: expected 'func', got the end"),
        ("sync function @m", "signature, position 5: expected 'func', got 'function @m'"),
        ("func main() -> ()", "signature, position 5: expected '@' and the function's name, got 'main() -> ()'"),
        ("func @(%a: i32) -> ()", "signature, position 6: expected the function's name, got '(%a: i32) -> ()'"),
        (
            "func @main",
            "signature, position 6: expected '(' and arguments, each '%', a name, ':' and a type, got 'main'",
        ),
        (
            "func @main(a: i32) -> ()",
            "signature, position 10: expected '(' and arguments, each '%', a name, ':' and a type, "
            "got '(a: i32) -> ()'",
        ),
        ("func @main(%a) -> ()", "signature, position 12: expected a name, ':' and a type, got 'a) -> ()'"),
        ("func @main(%a: ) -> ()", "signature, position 15: expected a type, got ') -> ()'"),
        ("func @main(%a: f32 -> ()", "signature, position 19: expected ',' or ')', got '-> ()'"),
        ("func @main(%a: f32) -> () x", "signature, position 26: expected the end, got 'x'"),
        ("func @main(%a: f32)", "signature, position 19: expected '->', got the end"),
        ("func @main(%a: float) -> ()", "signature, position 15: expected a type, got 'float) -> ()'"),
        ("func @main(%a: tensor) -> ()", "signature, position 21: expected '<' and the tensor's sizes, got ') -> ()'"),
        (
            "func @main(%a: tensor<>) -> ()",
            "signature, position 22: expected an element type or a size, got '>) -> ()'",
        ),
        ("func @main(%a: tensor<4f32>) -> ()", "signature, position 23: expected 'x' behind a size, got 'f32>) -> ()'"),
        (
            "func @main(%a: tensor<4xfloat>) -> ()",
            "signature, position 24: expected an element type or a size, got 'float>) -> ()'",
        ),
        ("func @main(%a: tensor<4xf32) -> ()", "signature, position 27: expected '>' or ',', got ') -> ()'"),
        ("func @main(%a: !util.list<?) -> ()", "signature, position 27: expected '>', got ') -> ()'"),
        ("func @main(%a: i32 {x = }) -> ()", "signature, position 24: expected the value of x, got '}) -> ()'"),
        ("func @main(%a: i32 {= 1}) -> ()", "signature, position 20: expected an attribute's name, got '= 1}) -> ()'"),
        ('func @main(%a: i32 {a = "x}) -> ()', "signature, position 24: expected a closed string, got '\"x}) -> ()'"),
        (
            "func @main(%a: i32 {iree.abi.output = 3 : index}) -> ()",
            "signature: iree.abi.output of argument 0 (a): expected the index of one of 0 results, got '3 : index'",
        ),
        (
            "func @main(%a: !hal.buffer {iree.abi.output = x}) -> (%r: i32)",
            "signature: iree.abi.output of argument 0 (a): expected the index of one of 1 results, got 'x'",
        ),
        (
            "func @f(%a: !hal.buffer {iree.abi.output = 0 : index}, %b: !hal.buffer {iree.abi.output = 0 : index}) -> "
            "(%r: tensor<4xf32>)",
            "signature: iree.abi.output of argument 1 (b): result 0 has argument 0 for its storage already",
        ),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(SignatureError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_only_text_is_parsed() -> None:
    with pytest.raises(TypeError, match=r"^signature: expected a str, got bytes$"):
        parse(b"func @f() -> ()")  # type: ignore[arg-type]


NAMES = st.text(st.characters(exclude_characters=",(){}", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
ELEMENTS = st.sampled_from(["i1", "i8", "ui16", "f32", "bf16", "f8E5M2", "complex<f64>", "index", "i4"])
TENSORS = st.builds(TensorType, ELEMENTS, st.lists(st.none() | st.integers(0, 99), max_size=4).map(tuple))
TYPES = TENSORS | st.builds(ScalarType, st.sampled_from(["i32", "f64"])) | st.just(OpaqueType("!hal.buffer_view"))
VALUES = st.lists(st.builds(Value, NAMES, TYPES), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.builds(Signature, NAMES.filter(lambda name: "@" not in name), VALUES, VALUES, st.booleans()))
def test_round_trip_of_anything(signature: Signature) -> None:
    # A name that looks like ": type" to its end could not be told from one.
    names = [value.name for value in (*signature.arguments, *signature.results)]
    if not any(":" in name for name in names):
        assert parse(str(signature)) == signature


@pytest.mark.parametrize(
    "program",
    [
        "ADD",
        "DYNAMIC",
        pytest.param("SCALARS", marks=releases.NO_F64_SCALARS),
        "NAMED",
        "NOTHING",
        "LISTS",
        "STORAGE_BUFFER",
        "STORAGE_SECOND",
    ],
)
def test_real_declarations(program: str) -> None:
    module = rt.VmModule.copy_buffer(devices.vm_instance(), modules.compiled(getattr(modules, program), modules.WIDE))
    text = module.lookup_function("main").reflection["iree.abi.declaration"]
    assert str(parse(text)) == text


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "accepted"),
    [
        ("i1", [torch.bool]),
        ("i8", [torch.int8, torch.uint8]),
        ("i64", [torch.int64, torch.uint64]),
        ("si16", [torch.int16]),
        ("ui32", [torch.uint32]),
        ("bf16", [torch.bfloat16]),
        ("complex<f32>", [torch.complex64]),
        ("f8E4M3FN", [torch.float8_e4m3fn]),
        ("i4", []),
    ],
)
def test_dtypes(element: str, accepted: list[torch.dtype]) -> None:
    kind = TensorType(element, (2, None))
    assert list(kind.accepts) == accepted
    assert kind.dtype == (accepted[0] if accepted else None)
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.float32, torch.bfloat16):
        assert kind.admits(dtype, (2, 5)) == (dtype in accepted)


@pytest.mark.parametrize(
    ("shape", "fits"), [((2, 3), True), ((2, 0), True), ((3, 3), False), ((2,), False), ((2, 3, 1), False)]
)
def test_shapes(shape: tuple[int, ...], fits: bool) -> None:
    assert TensorType("f32", (2, None)).admits(torch.float32, shape) is fits


# ---- scalars --------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("kind", "value", "passed"),
    [
        ("i32", 5, 5),
        ("i32", -(2**31), -(2**31)),
        ("i32", True, 1),
        ("i32", 2.0, 2),
        ("i32", np.int8(-3), -3),
        ("i32", torch.tensor(7), 7),
        ("i32", torch.tensor(7, dtype=torch.uint8), 7),
        ("i32", Level.HIGH, 3),
        ("i64", 2**63 - 1, 2**63 - 1),
        ("index", 4, 4),
        ("i1", False, 0),
        ("i1", torch.tensor(True), 1),
        ("ui8", 255, 255),
        ("f32", 2, 2.0),
        ("f32", 2**100, 2.0**100),
        ("f32", 0.1, 0.1),
        ("f32", np.float32(2.5), 2.5),
        ("f32", np.array(2.5), 2.5),
        ("f32", torch.tensor(2.5), 2.5),
        ("f32", math.inf, math.inf),
        ("f64", 1e300, 1e300),
        ("f64", 2**53, 2.0**53),
        ("f64", -0.0, -0.0),
    ],
)
def test_scalars_taken(kind: str, value: object, passed: float) -> None:
    found = ScalarType(kind).convert(value)
    assert found == passed
    assert type(found) is type(passed)


@pytest.mark.parametrize(
    ("kind", "value", "error", "message"),
    [
        ("i32", 2.7, ValueError, "float 2.7, which is not an integer"),
        ("i32", math.nan, ValueError, "float nan, which is not an integer"),
        ("i32", math.inf, ValueError, "float inf, which is not an integer"),
        ("i32", 2**31 + 5, ValueError, "int 2147483653, which is outside -2147483648 to 2147483647"),
        ("i1", 2, ValueError, "int 2, which is outside 0 to 1"),
        ("i8", 200, ValueError, "int 200, which is outside -128 to 127"),
        (
            "i64",
            2**63,
            ValueError,
            "int 9223372036854775808, which is outside -9223372036854775808 to 9223372036854775807",
        ),
        ("f32", 2**24 + 1, ValueError, "int 16777217, which f32 cannot hold exactly"),
        ("f32", 2**128, ValueError, "int 340282366920938463463374607431768211456, which f32 cannot hold exactly"),
        ("f64", 2**53 + 1, ValueError, "int 9007199254740993, which f64 cannot hold exactly"),
        ("f64", 2**2000, ValueError, None),
        ("f32", 1e39, ValueError, "float 1e+39, which is beyond the largest f32"),
        ("f16", 1.0, ValueError, "float 1.0; scalars of type f16 cannot be passed to IREE, use a tensor"),
        ("i32", torch.zeros(1), ValueError, "Tensor of shape (1,), which is not one number"),
        ("i32", np.zeros((2, 2)), ValueError, "ndarray of shape (2, 2), which is not one number"),
        ("i32", "5", TypeError, "str"),
        ("i32", None, TypeError, "NoneType"),
        ("f32", 1j, TypeError, "complex"),
        ("f32", torch.tensor(1j), TypeError, "Tensor"),
        ("i32", [1], TypeError, "list"),
    ],
)
def test_scalars_refused(kind: str, value: object, error: type[Exception], message: str | None) -> None:
    with pytest.raises(error) as caught:
        ScalarType(kind).convert(value)
    if message is not None:
        assert str(caught.value) == message
