# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes docs/api.md from the docstrings: ``python docs/make_api.py``. A test checks that the page is current."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).with_name("api.md")

HEAD = """# API reference

Made from the docstrings by `python docs/make_api.py`; edit those. `im` is `iree_marshal`. How the pieces work together:
[how-it-works.md](how-it-works.md). Errors by their text: [troubleshooting.md](troubleshooting.md).
"""

# Title, and each name with the members that are shown besides its docstring.
ENTRIES: tuple[tuple[str, dict[str, tuple[str, ...]]], ...] = (
    (
        "Lists of values",
        {
            "iree_marshal.to_variant_list": (),
            "iree_marshal.from_variant_list": (),
            "iree_marshal.order": (),
            "iree_marshal.record_stream": (),
            "iree_marshal.HalArray": ("torch", "numpy"),
        },
    ),
    (
        "Devices and memory",
        dict.fromkeys(("iree_marshal.hal_device", "iree_marshal.register_device", "iree_marshal.memory_stats"), ()),
    ),
    (
        "Executor",
        {
            "iree_marshal.Executor": (
                "load", "__call__", "submit", "bind", "unbind", "trim", "signature", "device", "last_timing",
            ),
            "iree_marshal.pending.Pending": ("done", "result"),
            "iree_marshal.calling.Timing": (),
            "iree_marshal.signature.Signature": ("inputs", "storage"),
            "iree_marshal.signature.parse": (),
        },
    ),
    (
        "torch.compile and iree-turbine",
        {
            "iree_marshal.backend.iree_marshal": (),
            "iree_marshal.backend.Options": (),
            "iree_marshal.backend.register": (),
            "iree_marshal.turbine.accelerate": (),
        },
    ),
    (
        "Errors and warnings",
        dict.fromkeys(
            (
                "iree_marshal.UnsupportedRuntimeError",
                "iree_marshal.signature.SignatureError",
                "iree_marshal.inputs.InputChangedWarning",
                "iree_marshal.backend.FallbackWarning",
                "iree_marshal.backend.MismatchError",
                "iree_marshal.backend.CompileError",
                "iree_marshal.backend.MissingCompilerError",
            ),
            (),
        ),
    ),
)  # fmt: skip

# What users are given and do not make.
_NOT_CALLED = ("iree_marshal.HalArray", "iree_marshal.pending.Pending", "iree_marshal.calling.Timing")

_LISTS = ("Parameters", "Attributes", "Returns", "Raises")


def _markdown(text: str) -> str:
    """What is marked up for Sphinx, marked up for Markdown."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of a numpydoc text; the first one has no title."""
    lines: list[str] = []
    title, rest = "", text.splitlines()
    while rest:
        line = rest.pop(0)
        if line and rest and set(rest[0]) == {"-"}:
            yield title, lines
            rest.pop(0)
            title, lines = line, []
        else:
            lines.append(line)
    yield title, lines


def _items(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Unindented heads with the indented text below each."""
    body: list[str] = []
    head = ""
    for line in lines:
        if line and not line.startswith(" "):
            if head:
                yield head, body
            head, body = line, []
        else:
            body.append(line.removeprefix("    "))
    if head:
        yield head, body


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line:
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _prose(lines: Sequence[str]) -> str:
    shown = []
    for paragraph in _paragraphs(lines):
        if paragraph[0].startswith(">>>"):
            code = [re.sub(r"\s*# doctest: \S+$", "", line) for line in paragraph]
            shown.append("\n".join(["```pycon", *code, "```"]))
        elif len(paragraph) > 1 and paragraph[1].startswith("    "):
            shown.append(
                "\n".join(f"- {_markdown(head)}: {_markdown(' '.join(body))}" for head, body in _items(paragraph))
            )
        else:
            shown.append(_markdown("\n".join(paragraph)))
    return "\n\n".join(shown)


def _list(lines: Sequence[str]) -> str:
    shown = []
    for head, body in _items(lines):
        name, colon, kind = head.partition(" : ")
        first = f"- `{name}`" + (f" ({_markdown(kind)})" if colon else "")
        text = _prose(body)
        indented = text.replace("\n", "\n  ").replace("\n  \n", "\n\n")
        shown.append(f"{first}: {indented}" if text else first)
    return "\n".join(shown)


def _docstring(subject: Any) -> str:
    shown = []
    for title, lines in _sections(inspect.getdoc(subject) or ""):
        text = _list(lines) if title in _LISTS else _prose(lines)
        if text:
            shown.append(f"**{title}**\n\n{text}" if title else text)
    return "\n\n".join(shown)


class _Verbatim(str):
    """An annotation, which is a text already, shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(name: str, subject: Any) -> str:
    """One line, or one parameter a line where that is too long; without `self`."""
    if isinstance(subject, type) and issubclass(subject, Exception):
        bases = ", ".join(base.__name__ for base in subject.__bases__)
        return f"class {name}({bases})"
    signature = inspect.signature(subject)
    parameters = [
        one.replace(annotation=_Verbatim(one.annotation))
        for one in signature.parameters.values()
        if one.name not in ("self", "cls")
    ]
    returns = inspect.Signature.empty if isinstance(subject, type) else _Verbatim(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=returns))
    if len(name + text) <= 100:
        return name + text
    lines, starred = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        starred = starred or one.kind is one.VAR_POSITIONAL
        lines.append(f"    {one},")
    return "\n".join([f"{name}(", *lines, ")" + text.rpartition(")")[2]])


def _entry(name: str, members: Sequence[str]) -> str:
    module, _, attribute = name.rpartition(".")
    subject = getattr(importlib.import_module(module), attribute)
    shown = attribute if module == "iree_marshal" else name.removeprefix("iree_marshal.")
    call = f"im.{attribute}" if module == "iree_marshal" else name
    parts = [f"### {shown}"]
    if name not in _NOT_CALLED:
        parts.append(f"```text\n{_signature(call, subject)}\n```")
    parts.append(_docstring(subject))
    for member in members:
        inner = inspect.getattr_static(subject, member)
        if isinstance(inner, (property, functools.cached_property)):
            parts.append(f"#### {attribute}.{member}\n\n{_docstring(inner)}")
            continue
        inner = getattr(subject, member)
        called = attribute.lower() if member == "__call__" else f"{attribute}.{member}"
        parts.append(f"#### {attribute}.{member}\n\n```text\n{_signature(called, inner)}\n```\n\n{_docstring(inner)}")
    return "\n\n".join(parts)


def render() -> str:
    """The page's text."""
    parts = [HEAD.rstrip()]
    for title, names in ENTRIES:
        parts.append(f"## {title}")
        parts += [_entry(name, members) for name, members in names.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
