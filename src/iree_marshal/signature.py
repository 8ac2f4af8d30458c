# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compiled function takes and returns: the grammar of ``iree.abi.declaration``, and checks of values against it.

IREE's compiler writes one line per exported function into its reflection::

    sync func @main(%x: tensor<?xf32>, %n: i32, %s: !hal.buffer {iree.abi.output = 0 : index}) -> (%y: tensor<?xf32>)

Names come from the program and are written as they are, spaces, colons and parentheses included, so a name ends where
what follows reads as ``: type``, not at a fixed character.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

__all__ = ["OpaqueType", "ScalarType", "Signature", "SignatureError", "TensorType", "Value", "parse"]

OUTPUT_ATTRIBUTE = "iree.abi.output"
ENCODING_ATTRIBUTE = "iree.abi.encoding"


def _dtypes(*names: str) -> tuple[torch.dtype, ...]:
    # float8_e8m0fnu and the unsigned kinds came to torch late.
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


# Element type in MLIR -> the dtypes a tensor argument may have; the first one is what a result of this type has.
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "i1": _dtypes("bool"),
    "i8": _dtypes("int8", "uint8"),
    "i16": _dtypes("int16", "uint16"),
    "i32": _dtypes("int32", "uint32"),
    "i64": _dtypes("int64", "uint64"),
    "si8": _dtypes("int8"),
    "si16": _dtypes("int16"),
    "si32": _dtypes("int32"),
    "si64": _dtypes("int64"),
    "ui8": _dtypes("uint8"),
    "ui16": _dtypes("uint16"),
    "ui32": _dtypes("uint32"),
    "ui64": _dtypes("uint64"),
    "f16": _dtypes("float16"),
    "bf16": _dtypes("bfloat16"),
    "f32": _dtypes("float32"),
    "f64": _dtypes("float64"),
    "f8E4M3FN": _dtypes("float8_e4m3fn"),
    "f8E4M3FNUZ": _dtypes("float8_e4m3fnuz"),
    "f8E5M2": _dtypes("float8_e5m2"),
    "f8E5M2FNUZ": _dtypes("float8_e5m2fnuz"),
    "f8E8M0FNU": _dtypes("float8_e8m0fnu"),
    "complex<f32>": _dtypes("complex64"),
    "complex<f64>": _dtypes("complex128"),
}
# Scalar kinds of integers: lowest and highest value. i1 to i32 and i64 hold signed and unsigned values alike in IREE;
# only signed ones are taken, so that a value means the same on both sides (i1: 0 and 1).
_INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "i1": (0, 1),
    **{f"{sign}i{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for sign in ("", "s") for bits in (8, 16, 32, 64)},
    "ui8": (0, 2**8 - 1),
    "ui16": (0, 2**16 - 1),
    "ui32": (0, 2**32 - 1),
    "index": (-(2**63), 2**63 - 1),
}
_FLOAT_KINDS: dict[str, tuple[int, float]] = {"f32": (24, 3.4028234663852886e38), "f64": (53, math.inf)}


class SignatureError(ValueError):
    """A text is not in the grammar of ``iree.abi.declaration``."""


@dataclass(frozen=True)
class TensorType:
    """A tensor: its element type as MLIR writes it, its sizes (`None` where dynamic), and an encoding if it has one."""

    element: str
    shape: tuple[int | None, ...]
    encoding: str | None = None

    @property
    def accepts(self) -> tuple[torch.dtype, ...]:
        """The dtypes that an argument of this type may have; empty where torch has none."""
        return _DTYPES.get(self.element, ())

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a result of this type has; integers of IREE have no sign and come as signed ones."""
        return self.accepts[0] if self.accepts else None

    @property
    def static(self) -> bool:
        """Whether all sizes are known."""
        return None not in self.shape

    def admits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this dtype and shape may be passed."""
        return (
            dtype in self.accepts
            and len(shape) == len(self.shape)
            and all(wanted is None or wanted == size for wanted, size in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        sizes = "".join("?x" if size is None else f"{size}x" for size in self.shape)
        return f"tensor<{sizes}{self.element}{f', {self.encoding}' if self.encoding else ''}>"


@dataclass(frozen=True)
class ScalarType:
    """A number: ``i1`` to ``i64``, ``index``, ``f32``, ``f64`` and what else MLIR has."""

    kind: str

    def __str__(self) -> str:
        return self.kind

    @property
    def floating(self) -> bool:
        """Whether IREE takes it as a floating-point number."""
        return self.kind in _FLOAT_KINDS

    @property
    def integers(self) -> tuple[int, int] | None:
        """Lowest and highest value of an integer kind, `None` for others."""
        return _INTEGER_RANGES.get(self.kind)

    @property
    def largest(self) -> float:
        """The largest finite number of a floating kind."""
        return _FLOAT_KINDS[self.kind][1]

    def convert(self, value: Any) -> int | float:
        """Return the number that is passed for `value`.

        Parameters
        ----------
        value : int, float, bool, numpy scalar, or tensor or array of rank 0
            Converted exactly or refused; only a float for an ``f32`` is rounded.

        Raises
        ------
        TypeError
            Not a number.
        ValueError
            A number that this kind does not hold; the text starts with what was got.
        """
        number = _number(value)
        if self.kind in _INTEGER_RANGES:
            return self._integer(number, value)
        if self.kind in _FLOAT_KINDS:
            return self._float(number, value)
        raise ValueError(f"{_shown(value)}; scalars of type {self.kind} cannot be passed to IREE, use a tensor")

    def _integer(self, number: float, value: Any) -> int:
        if isinstance(number, float):
            if not number.is_integer():
                raise ValueError(f"{_shown(value)}, which is not an integer")
            number = int(number)
        low, high = _INTEGER_RANGES[self.kind]
        if not low <= number <= high:
            raise ValueError(f"{_shown(value)}, which is outside {low} to {high}")
        return number

    def _float(self, number: float, value: Any) -> float:
        precision, largest = _FLOAT_KINDS[self.kind]
        if isinstance(number, int):
            # Trailing zeros do not count: 2**100 is exact in f32.
            trailing = (number & -number).bit_length() - 1 if number else 0
            if abs(number).bit_length() - trailing > precision or abs(number) > min(largest, 2**1023):
                raise ValueError(f"{_shown(value)}, which {self.kind} cannot hold exactly")
            return float(number)
        if math.isfinite(number) and abs(number) > largest:
            raise ValueError(f"{_shown(value)}, which is beyond the largest {self.kind}")
        return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _number(value: Any) -> int | float:
    """Return `value` as a Python number; arrays and tensors must have rank 0."""
    if isinstance(value, (torch.Tensor,)) or (hasattr(value, "shape") and hasattr(value, "item")):
        if tuple(value.shape) != ():
            raise ValueError(f"{type(value).__name__} of shape {tuple(value.shape)}, which is not one number")
        number = value.item()
    elif isinstance(value, (torch.SymInt, torch.SymBool)):
        number = int(value)
    elif isinstance(value, torch.SymFloat):
        number = float(value)
    else:
        number = value
    if isinstance(number, (int, float)):
        # Of a subclass (bool, enum) only the value counts.
        return int(number) if isinstance(number, int) else float(number)
    if isinstance(number, numbers.Integral):
        return operator.index(number)
    raise TypeError(f"{type(value).__name__}")


@dataclass(frozen=True)
class OpaqueType:
    """Any other type, as it is written: ``!hal.buffer``, ``!util.list<?>``, ``vector<4xf32>``."""

    text: str

    def __str__(self) -> str:
        return self.text


Type = TensorType | ScalarType | OpaqueType


@dataclass(frozen=True)
class Value:
    """One argument or result: its name, its type and its attributes as they are written."""

    name: str
    type: Type
    attributes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def abi_type(self) -> Type:
        """The type that crosses the border: the ``iree.abi.encoding`` where one is given."""
        encoding = self.attributes.get(ENCODING_ATTRIBUTE)
        return self.type if encoding is None else _Parser(encoding).whole_type()

    @cached_property
    def output(self) -> int | None:
        """The index of the result that is written into this argument's memory, for a storage argument."""
        text = self.attributes.get(OUTPUT_ATTRIBUTE)
        return None if text is None else int(text.partition(":")[0])

    def __str__(self) -> str:
        attributes = ", ".join(f"{key} = {text}" for key, text in self.attributes.items())
        return f"%{self.name}: {self.type}{f' {{{attributes}}}' if attributes else ''}"


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns; ``str()`` gives the declaration back.

    Attributes
    ----------
    name : str
        The function's name.
    arguments, results : tuple of Value
        In order. Storage arguments are among the arguments; fences are not.
    fences : bool
        Whether the function takes a wait and a signal fence behind its arguments and returns before its work is done.
    """

    name: str
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    fences: bool = False

    @cached_property
    def storage(self) -> Mapping[int, int]:
        """Result index -> index of the argument that it is written into."""
        return {value.output: place for place, value in enumerate(self.arguments) if value.output is not None}

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Indices of the arguments that a caller passes: all but the storage arguments."""
        return tuple(place for place, value in enumerate(self.arguments) if value.output is None)

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        results = ", ".join(map(str, self.results))
        return f"{'async' if self.fences else 'sync'} func @{self.name}({arguments}) -> ({results})"


def parse(text: str) -> Signature:
    """Parse a declaration.

    Parameters
    ----------
    text : str
        In the grammar of ``iree.abi.declaration``; ``sync`` may be missing.

    Raises
    ------
    SignatureError
        With the position, what was expected there and what was found.
    """
    if not isinstance(text, str):
        raise TypeError(f"signature: expected a str, got {type(text).__name__}")
    return _Parser(text).declaration()


_OPEN = {"<": ">", "(": ")", "[": "]", "{": "}"}


class _Parser:
    """Recursive descent over the characters of one declaration."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    # ---- characters ----

    def fail(self, expected: str) -> SignatureError:
        rest = self.text[self.at : self.at + 20]
        got = f"{rest!r}{'...' if self.at + 20 < len(self.text) else ''}" if rest else "the end"
        return SignatureError(f"signature, position {self.at}: expected {expected}, got {got}")

    def space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def accept(self, token: str) -> bool:
        """Skip white space and `token`, if it is next; a word must not go on behind it."""
        self.space()
        if not self.text.startswith(token, self.at):
            return False
        end = self.at + len(token)
        if token[-1].isalnum() and end < len(self.text) and (self.text[end].isalnum() or self.text[end] in "_."):
            return False
        self.at = end
        return True

    def expect(self, token: str, what: str = "") -> None:
        if not self.accept(token):
            raise self.fail(what or repr(token))

    def word(self, extra: str, what: str) -> str:
        """A run of letters, digits and the characters in `extra`."""
        self.space()
        start = self.at
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in extra):
            self.at += 1
        if self.at == start:
            raise self.fail(what)
        return self.text[start : self.at]

    def balanced(self, stops: str, what: str) -> str:
        """Text up to one of `stops` outside of brackets and strings."""
        self.space()
        start = self.at
        closers: list[str] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.string()
                continue
            if not closers and character in stops:
                break
            if closers and character == closers[-1]:
                closers.pop()
            elif character in _OPEN:
                closers.append(_OPEN[character])
            elif character in ")]}" or (character == ">" and self.text[self.at - 1] != "-"):
                break
            self.at += 1
        if closers:
            raise self.fail(repr(closers[-1]))
        found = self.text[start : self.at].strip()
        if not found:
            raise self.fail(what)
        return found

    def string(self) -> None:
        start = self.at
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            self.at += 2 if self.text[self.at] == "\\" else 1
        if self.at >= len(self.text):
            self.at = start
            raise self.fail("a closed string")
        self.at += 1

    # ---- grammar ----

    def declaration(self) -> Signature:
        fences = self.accept("async")
        if not fences:
            self.accept("sync")
        self.expect("func")
        self.expect("@", "'@' and the function's name")
        name = self.function_name()
        arguments = self.values()
        self.expect("->")
        results = self.values()
        self.space()
        if self.at != len(self.text):
            raise self.fail("the end")
        signature = Signature(name, arguments, results, fences)
        self.check_storage(signature)
        return signature

    def check_storage(self, signature: Signature) -> None:
        taken: dict[int, int] = {}
        for place, value in enumerate(signature.arguments):
            if OUTPUT_ATTRIBUTE not in value.attributes:
                continue
            try:
                output = value.output
            except ValueError:
                output = None
            if output is None or not 0 <= output < len(signature.results):
                raise SignatureError(
                    f"signature: {OUTPUT_ATTRIBUTE} of argument {place} ({value.name}): expected the index of one of "
                    f"{len(signature.results)} results, got {value.attributes[OUTPUT_ATTRIBUTE]!r}"
                )
            if output in taken:
                raise SignatureError(
                    f"signature: {OUTPUT_ATTRIBUTE} of argument {place} ({value.name}): result {output} has argument "
                    f"{taken[output]} for its storage already"
                )
            taken[output] = place

    def function_name(self) -> str:
        """Everything up to the parenthesis that opens the arguments; a name may hold parentheses itself."""
        start = self.at
        end = self.text.find("(", start)
        while end >= 0:
            rest = self.text[end + 1 :].lstrip()
            if rest.startswith(("%", ")")):
                break
            end = self.text.find("(", end + 1)
        if end < 0 or ") ->" in self.text[start:end]:
            self.at = max(self.text.find("(", start), start)
            raise self.fail("'(' and arguments, each '%', a name, ':' and a type")
        self.at = end
        if end == start:
            raise self.fail("the function's name")
        return self.text[start:end]

    def values(self) -> tuple[Value, ...]:
        self.expect("(")
        values: list[Value] = []
        if self.accept(")"):
            return ()
        while True:
            values.append(self.value())
            if self.accept(")"):
                return tuple(values)
            self.expect(",", "',' or ')'")

    def value(self) -> Value:
        self.expect("%", "'%' and a name")
        start = self.at
        problem: SignatureError | None = None
        colon = self.text.find(":", start)
        while colon >= 0:
            # The first colon behind which a type, attributes and the value's end can be read.
            self.at = colon + 1
            try:
                kind = self.type()
                attributes = self.attributes()
                self.space()
                if self.at < len(self.text) and self.text[self.at] in ",)":
                    value = Value(self.text[start:colon].strip(), kind, attributes)
                    value.abi_type  # noqa: B018 - raises for a broken encoding
                    return value
                raise self.fail("',' or ')'")
            except SignatureError as error:
                problem = problem or error
            colon = self.text.find(":", colon + 1)
        if problem is not None:
            raise problem
        self.at = start
        raise self.fail("a name, ':' and a type")

    def attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.accept("{"):
            return found
        while not self.accept("}"):
            if found:
                self.expect(",", "',' or '}'")
            key = self.word("._$-", "an attribute's name")
            found[key] = self.balanced(",", f"the value of {key}") if self.accept("=") else "unit"
        return found

    def whole_type(self) -> Type:
        kind = self.type()
        self.space()
        if self.at != len(self.text):
            raise self.fail("the end of the type")
        return kind

    def type(self) -> Type:
        self.space()
        start = self.at
        if self.accept("tensor"):
            return self.tensor()
        if self.text.startswith("!", self.at):
            self.at += 1
            self.word("._$", "the name of a type")
        else:
            kind = self.word("_", "a type")
            if not self.text.startswith("<", self.at):
                if not _is_scalar(kind):
                    self.at = start
                    raise self.fail("a type")
                return ScalarType(kind)
        if self.text.startswith("<", self.at):
            self.at += 1
            if not self.text.startswith(">", self.at):
                self.balanced(">", "the parameters of the type")
            self.expect(">")
        return OpaqueType(self.text[start : self.at])

    def tensor(self) -> TensorType:
        self.expect("<", "'<' and the tensor's sizes")
        shape: list[int | None] = []
        while True:
            start = self.at
            if self.accept("?"):
                size: int | None = None
            elif self.at < len(self.text) and self.text[self.at].isdigit():
                while self.at < len(self.text) and self.text[self.at].isdigit():
                    self.at += 1
                size = int(self.text[start : self.at])
            else:
                break
            if not self.text.startswith("x", self.at):
                raise self.fail("'x' behind a size")
            self.at += 1
            shape.append(size)
        element = str(self.element())
        encoding = self.balanced(">", "an encoding") if self.accept(",") else None
        self.expect(">", "'>' or ','")
        return TensorType(element, tuple(shape), encoding)

    def element(self) -> str:
        start = self.at
        kind = self.word("_", "an element type or a size")
        if kind == "complex":
            self.expect("<")
            inner = self.word("_", "the type of the parts")
            self.expect(">")
            return f"complex<{inner}>"
        if not _is_scalar(kind):
            self.at = start
            raise self.fail("an element type or a size")
        return kind


def _is_scalar(kind: str) -> bool:
    """Whether MLIR has a number of this name: i7, si8, ui32, f16, bf16, tf32, f8E4M3FN, index."""
    if kind in ("index", "bf16", "tf32"):
        return True
    if kind.startswith("f") and len(kind) > 1 and kind[1].isdigit():
        return kind[1:].isdigit() or kind in _DTYPES or "E" in kind
    return any(kind.startswith(prefix) and kind[len(prefix) :].isdigit() for prefix in ("si", "ui", "i"))
