# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile: whatever goes wrong is said, and the graph runs eager or raises, as asked."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import Graphs, assert_same, compile_
from torch.fx.experimental.proxy_tensor import make_fx

from iree_marshal import backend
from iree_marshal.backend import (
    CompileError,
    FallbackWarning,
    MismatchError,
    decompositions,
    graphs,
    pipeline,
    toolchain,
)
from iree_marshal.backend.verify import Mismatch, acquit


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)


@pytest.fixture
def _no_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace with torch's own table: what IREE gets wrong is not taken apart first."""
    monkeypatch.setattr(decompositions, "table", torch._decomp.core_aten_decompositions)


def _falls_back(function: Any, *arguments: torch.Tensor, match: str) -> None:
    """One warning that names the graph and the cause, and eager's results, in this call and the next."""
    run = compile_(function, fallback=True)
    with pytest.warns(FallbackWarning, match=match) as caught:
        assert_same(run(*arguments), function(*arguments))
    assert len([warning for warning in caught if warning.category is FallbackWarning]) == 1
    assert re.search(r"graph \d+ \(inference, \d+ operators, test_compile_failures.py:\d+\)", str(caught[0].message))
    assert_same(run(*arguments), function(*arguments))


def _floor_divide(x: torch.Tensor) -> torch.Tensor:
    return x // 3


def test_a_crash_of_the_compiler_is_survived() -> None:
    """IREE 3.13's compiler segfaults on floor division of int8."""
    _falls_back(_floor_divide, torch.arange(-50, 50).to(torch.int8), match="the IREE compiler crashed with signal")


def test_a_crash_raises_without_fallback() -> None:
    with pytest.raises(Exception, match="the IREE compiler crashed with signal"):
        compile_(_floor_divide)(torch.arange(1, 50).to(torch.int8))


def _sum_of_all(*tensors: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, tensors)


def test_a_module_that_does_not_load_is_survived_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 31 inputs fused into one dispatch: "binding count 33 > 32" when it is loaded."""
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    _falls_back(_sum_of_all, *[torch.randn(64, 64) for _ in range(32)], match="does not load.*binding count")
    assert not list(tmp_path.glob("*.vmfb"))


def test_an_operator_that_the_importer_does_not_know() -> None:
    _falls_back(lambda x: torch.linalg.eigvals(x).abs().sort()[0], torch.randn(4, 4), match="IREE|importer|compiler")


def _larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x, y)


@pytest.fixture
def _wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every maximum be compiled as a minimum."""
    right = pipeline.import_graph

    def wrong(*arguments: Any, **more: Any) -> str:
        program = right(*arguments, **more).replace("torch.aten.maximum", "torch.aten.minimum")
        # Of floats it is a comparison and a selection.
        return program.replace("torch.aten.gt.Tensor", "torch.aten.lt.Tensor")

    monkeypatch.setattr(pipeline, "import_graph", wrong)


@pytest.mark.usefixtures("_wrong_program")
def test_a_wrong_program_is_caught_by_the_first_call() -> None:
    x, y = torch.randn(64), torch.randn(64)
    _falls_back(_larger, x, y, match=r"output 0 \(torch.float32\) is off by [0-9.]+ on values up to [0-9.]+")
    integers = torch.arange(10), torch.arange(10).flip(0)
    _falls_back(_larger, *integers, match=r"output 0 \(torch.int64\) differs in 10 of 10 elements")


@pytest.mark.usefixtures("_wrong_program")
def test_a_wrong_program_raises_without_fallback_and_passes_unseen_without_verification() -> None:
    x, y = torch.randn(64), torch.randn(64)
    with pytest.raises(MismatchError, match="the compiled program is wrong"):
        compile_(_larger)(x, y)
    assert_same(compile_(_larger, verify="never")(x, y), torch.minimum(x, y))


@pytest.mark.usefixtures("_wrong_program")
def test_always_catches_what_only_a_later_call_shows() -> None:
    x = torch.randn(64)
    first, always = compile_(_larger), compile_(_larger, verify="always")
    assert_same(first(x, x.clone()), x)
    assert_same(first(x, x + 1), x)
    assert_same(always(x, x.clone()), x)
    with pytest.raises(MismatchError, match="is off by"):
        always(x, x + 1)


def test_a_program_that_writes_into_its_inputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_UPDATES", frozenset())
    x, values, rows = torch.randn(16, 64), torch.randn(2, 64), torch.tensor([1, 3])
    before = x.clone()
    _falls_back(lambda x, v, i: x.index_put((i,), v), x, values, rows, match=r"wrote into its tensor inputs \[0\]")
    assert torch.equal(x, before)


def test_noise_is_no_error() -> None:
    """A bias in front of a batch norm has gradient zero on paper, and noise in float32, eager's as much as ours."""
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    run = compile_(layers)
    run(torch.randn(4, 3, 9, 9)).square().sum().backward()


def test_nan_and_infinity_are_compared() -> None:
    x = torch.tensor([1.0, 0.0, -1.0, float("inf"), float("nan")])
    run = compile_(lambda x: (x / 0, x * 2, torch.sqrt(x)))
    for ours, eager in zip(run(x), (x / 0, x * 2, torch.sqrt(x)), strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.usefixtures("_no_decompositions")
def test_a_lost_nan_is_no_rounding() -> None:
    """IREE's maximum drops a NaN; noise that turns infinity into NaN must not acquit it."""
    x = torch.tensor([1.0, float("inf"), float("nan")])
    _falls_back(lambda x: torch.clamp_min(x, 0.0) * 1.0, x, match="is off by inf")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.0])
def test_one_overflow_does_not_excuse_an_error_elsewhere(wrong: float) -> None:
    x = torch.tensor([1e30, 1.0, 2.0])
    module = make_fx(lambda x: ((x * x) - 1e-9 * x,))(x)
    eager = module(x)
    ours = [eager[0].clone()]
    found = [Mismatch(0, "is told to be wrong", numeric=True)]
    assert not acquit(module, [x], ours, eager, found)
    ours[0][1] = wrong
    assert acquit(module, [x], ours, eager, found)


def test_compilation_errors_name_the_first_diagnostic() -> None:
    with pytest.raises(CompileError, match=r"graph x: the IREE compiler refused it \(exit status 1\):\n.*error:"):
        toolchain.compile_program("func.func @main() { nonsense }", toolchain.flags_for(torch.device("cpu")), "graph x")


def test_the_compiler_knows_the_flags_for_amd_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    program = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n  return %x : tensor<4xf32>\n}\n"
    assert toolchain.compile_program(program, toolchain.flags_for(torch.device("cuda", 0)), "graph x")


def test_devices_without_a_target() -> None:
    with pytest.raises(CompileError, match="no IREE target for torch device meta"):
        toolchain.flags_for(torch.device("meta"))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"verifi": "never"}, ValueError, "unknown option 'verifi'; did you mean 'verify'"),
        ({"zzz": 1}, ValueError, "known: cache, fallback, flags, storage, verify"),
        ({"verify": "sometimes"}, ValueError, "must be one of first, never, always, got 'sometimes'"),
        ({"fallback": 1}, TypeError, "option 'fallback' must be a bool, got int"),
        ({"flags": "-O3"}, TypeError, "option 'flags' must be a list of str"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        backend.Options.parse(options)


def test_flags_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []
    right = pipeline.compile_program

    def spy(program: str, flags: Sequence[str], name: str) -> bytes:
        seen.append(flags)
        return right(program, flags, name)

    monkeypatch.setattr(pipeline, "compile_program", spy)
    compile_(lambda x: x + 41, flags=["--iree-opt-level=O1"])(torch.randn(3))
    assert "--iree-opt-level=O1" in seen[0]


def test_a_missing_compiler_names_the_extra() -> None:
    """In a process where iree.compiler cannot be found."""
    script = """
import importlib.util, sys, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.startswith("iree.compiler") else find(name, *more)
from iree_marshal import backend
try:
    torch.compile(lambda x: x + 1, backend=backend.register())(torch.ones(3))
except Exception as error:
    text = str(error)
    assert "pip install 'iree_marshal[compile]'" in text, text
    print("named")
assert "iree.compiler" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "named", done.stderr


def test_verification_leaves_one_eager_run_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Graphs(monkeypatch)
    run = compile_(lambda x: x * 3)
    x = torch.randn(8)
    run(x)
    (graph,) = seen.compiled
    eager_runs = []
    module = graph._graph_module
    monkeypatch.setattr(graph, "_graph_module", lambda *values: eager_runs.append(1) or module(*values))
    run(x)
    assert not eager_runs
