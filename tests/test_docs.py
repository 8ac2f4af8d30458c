# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pages say what is there: their code runs, their links lead somewhere, the names and texts in them exist."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modules
import pytest
import torch

import iree_marshal.__main__
import iree_marshal.backend
import iree_marshal.executor
import iree_marshal.marshal

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "iree_marshal"
DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("a copy of the sources without the pages", allow_module_level=True)

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Pages whose code needs more than a namespace, and the test that runs it.
RUN_ELSEWHERE = {
    "docs/custom-executors.md": "test_docs_executors.py",
    "docs/distributed.md": "test_distributed.py",
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """One fenced block: its info string, its text, and the line that it begins at."""

    info: tuple[str, ...]
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    lines = page.read_text().splitlines()
    start = 0
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if start:
                blocks.append(Block(tuple(lines[start - 1][3:].split()), "\n".join(lines[start : number - 1]), start))
            start = 0 if start else number
    assert start == 0, f"{page.name}:{start}: a block without an end"
    return blocks


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


# ---- code -----------------------------------------------------------------------------------

# What a block may need, by the word in its info string or by what it imports.
NEEDS: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "compiler": lambda: importlib.util.find_spec("iree.compiler") is not None,
    "turbine": lambda: importlib.util.find_spec("iree.turbine") is not None,
}


def needs_of(block: Block) -> list[str]:
    """The words of the info string, and what the text cannot do without."""
    words = list(block.info[1:])
    assert set(words) <= set(NEEDS), block
    if "iree_marshal.turbine" in block.text:
        words.append("turbine")
    if "iree.compiler" in block.text:
        words.append("compiler")
    return words


def namespace_for(page: Path) -> dict[str, Any]:
    """What a page takes for granted."""
    namespace: dict[str, Any] = {"__name__": "page"}
    if page.name == "torch-compile.md":
        iree_marshal.backend.register()
        namespace["model"] = torch.nn.Linear(4, 2)
    return namespace


def expected_output(text: str) -> list[str]:
    """What the comments behind `print` say is printed."""
    return re.findall(r"^print\(.*\)  # (.*)$", text, flags=re.MULTILINE)


@contextlib.contextmanager
def turbine_restored() -> Iterator[None]:
    """Whatever a page did to iree-turbine is undone."""
    try:
        yield
    finally:
        turbine = sys.modules.get("iree_marshal.turbine")
        for acceleration in list(turbine._active) if turbine is not None else []:
            acceleration.undo()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = RUN_ELSEWHERE.get(name_of(page))
    if elsewhere is not None:
        assert f'"{page.name}"' in (Path(__file__).parent / elsewhere).read_text()
        return
    namespace = namespace_for(page)
    missing: set[str] = set()
    for block in blocks_of(page):
        if block.info[:1] != ("python",):
            continue
        # As many lines above it as in the page, for the traceback.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        missing |= {need for need in needs_of(block) if not NEEDS[need]()}
        if missing.intersection(needs_of(block)):
            continue
        printed = io.StringIO()
        with turbine_restored(), contextlib.redirect_stdout(printed):
            exec(code, namespace)
        expected = expected_output(block.text)
        assert not expected or printed.getvalue().splitlines() == expected, f"{page.name}:{block.line}"


def test_pages_have_code() -> None:
    """The test above finds what it looks for."""
    have = {name_of(page) for page in PAGES if any(block.info[:1] == ("python",) for block in blocks_of(page))}
    assert have >= {"README.md", "docs/streams.md", "docs/torch-compile.md", "docs/custom-executors.md"}


def test_a_wrong_comment_is_seen() -> None:
    assert expected_output("print(1 + 1)  # 3\nprint(x)\n") == ["3"]


def test_blocks_are_of_a_known_kind() -> None:
    """A block of Python that is called otherwise would not be run."""
    known = [("python",), ("pycon",), ("text",), ("mlir",), ("sh",)]
    strange = [
        f"{page.name}:{block.line}" for page in PAGES for block in blocks_of(page) if block.info[:1] not in known
    ]
    assert strange == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_code_stands_outside_blocks(page: Path) -> None:
    """Indented text behind an empty line is code as well, and would not be run."""
    indented = re.compile(r"^(?:    |\t)\s*(?![-*\d])\S.*", flags=re.MULTILINE)
    found = [match for before, match in re.findall(rf"(^$\n)({indented.pattern})", prose_of(page), re.MULTILINE)]
    assert found == []


def test_docstring_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the API page shows as typed at a prompt runs, and is all that it shows so."""
    (tmp_path / "model.vmfb").write_bytes(modules.compile_module(modules.ADD))
    monkeypatch.chdir(tmp_path)
    given = {"weight": torch.ones(4), "x": torch.arange(4.0)}
    shown = "\n".join(block.text for page in PAGES for block in blocks_of(page) if block.info[:1] == ("pycon",))
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for module in (iree_marshal.marshal, iree_marshal.executor):
        for test in finder.find(module, extraglobs=given):
            assert all(example.source.strip() in shown and not example.options for example in test.examples)
            runner.run(test)
    assert runner.failures == 0
    assert runner.tries == shown.count(">>> ") > 0


def commands_of(text: str) -> list[str]:
    """Lines of `sh` blocks, and inline code."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).splitlines() + re.findall(r"`([^`\n]+)`", text)
    return [line.partition("#")[0].strip() for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.MULTILINE))
    wrong = []
    for command in commands_of(page.read_text()):
        made = re.match(r"make (\w+)$", command)
        called = re.match(r"python -m iree_marshal ([\w|]+)", command)
        told = re.search(r"python ((?:docs|benchmarks)/\w+\.py)", command)
        if (
            (made and made[1] not in targets)
            or (called and not set(called[1].split("|")) <= set(iree_marshal.__main__.COMMANDS))
            or (told and not (ROOT / told[1]).exists())
            or not set(re.findall(r"(?:iree_marshal|\.)\[(\w+)\]", command)) <= extras
        ):
            wrong.append(command)
    assert wrong == []


def test_commands_are_found() -> None:
    found = commands_of((ROOT / "README.md").read_text())
    assert {"make demo", "make test", "make bench", "python -m iree_marshal doctor", "pip install '.[compile]'"} <= set(
        found
    )


def test_readme_example_has_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    examples = [block.text for block in blocks_of(ROOT / "README.md") if block.info[:1] == ("python",)]
    path = tmp_path / "example.py"
    path.write_text("\n".join(examples))
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--follow-imports", "silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(path)],
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- links ----------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(target)
    assert broken == []


def test_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


# ---- names and texts ------------------------------------------------------------------------


def test_rooms_are_the_ones_that_exist() -> None:
    """how-it-works.md names every source file, and no other."""
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|pyx|h))`", prose_of(DOCS / "how-it-works.md")))
    present = {
        str(path.relative_to(SOURCE))
        for suffix in ("py", "pyx", "h")
        for path in SOURCE.rglob(f"*.{suffix}")
        if path.name != "__init__.py" or path.parent == SOURCE
    }
    assert (sorted(named - present), sorted(present - named)) == ([], [])


def said(source: str) -> str:
    """A source with adjacent string literals joined and what an f-string fills in replaced by three dots."""
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    return re.sub(r"\{[^{}\n]*\}", "...", joined)


def test_said_joins_literals() -> None:
    assert 'f"...: expected ..., got ... here"' in said('f"{where(p)}: expected {a!r}, "\n        f"got {b} here"')


def test_troubleshooting_is_keyed_by_texts_that_occur() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    keys = re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)
    assert len(keys) > 20
    sources = "\n".join(said(path.read_text()) for suffix in ("py", "pyx") for path in SOURCE.rglob(f"*.{suffix}"))
    assert [key for key in keys if key not in sources] == []


def script(name: str) -> Any:
    """A program in docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_is_current() -> None:
    make_api = script("make_api")
    assert make_api.PAGE.read_text() == make_api.render(), "run: python docs/make_api.py"


REPORT: dict[str, Any] = {
    "machine": {"processor": "a processor", "cores": 4},
    "date": "2000-01-01 00:00 UTC",
    "versions": {"python": "3", "torch": "2"},
    "unit": {"ns": 1234.4},
    "settings": {"rounds": 7, "processes": 2},
    "cases": {
        "import.ours": {"median": 111.0, "iqr": 2.0, "ratio": 0.254, "per": "tensor"},
        "import.stock.to_dlpack": {"median": 20_000.0, "iqr": 3.0, "ratio": 9.9, "per": "tensor"},
        "export.ours": {"median": 222.0, "iqr": 2.0, "ratio": 0.5, "per": "tensor"},
        "call.2x2.own.known": {"median": 333.0, "iqr": 2.0, "ratio": 0.5, "per": "call"},
    },
    "derived": {"over.call.2x2.own.known.percent": {"value": 12.34}},
    "skipped": {"export.stock": "RuntimeError"},
}


def test_numbers_come_from_the_results(tmp_path: Path) -> None:
    numbers = script("make_numbers")
    page = f"before\n{numbers.BEGIN}something old\n{numbers.END}after\n"
    assert numbers.replace(page, tmp_path) == f"before\n{numbers.BEGIN}{numbers.END}after\n"
    (tmp_path / "cpu.json").write_text(json.dumps(REPORT))
    (tmp_path / "cpu-share.svg").write_text("")
    made = numbers.replace(page, tmp_path)
    assert "**a processor, 4 cores**, 2000-01-01 00:00 UTC, torch 2, python 3. One `t.detach()`: 1234 ns." in made
    assert "| 400 tensors in, each | 111.0 ns | 2.0 ns | 0.25 | 20.0 us |  |" in made
    assert "| 450 results out, each | 222.0 ns | 2.0 ns | 0.50 | fails |  |" in made
    assert "| call of 2 in, 2 out: known tensors | 333.0 ns | 2.0 ns |  |  | 12.3 % |" in made
    assert "](benchmarks/results/cpu-share.svg)\n" in made
    with pytest.raises(ValueError, match="no marks"):
        numbers.replace("a page", tmp_path)


def test_readme_numbers_are_the_recorded_ones() -> None:
    numbers = script("make_numbers")
    page = numbers.PAGE.read_text()
    assert page == numbers.replace(page, numbers.RESULTS), "run: make numbers"
    between = page.partition(numbers.BEGIN)[2].partition(numbers.END)[0]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", between), "no numbers"
    # Each of the three plots; that the files exist is what the test of links asks.
    for kind in numbers.PLOTS:
        assert f"-{kind}.svg)" in between
