# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The harness keeps its word about rounds, ratios and failures; `python -m iree_marshal bench` runs."""

from __future__ import annotations

import gc
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import iree_marshal.__main__ as command_line
from iree_marshal import bench, paths
from iree_marshal.bench import cases, memory, report
from iree_marshal.bench.harness import UNIT, Case, Derived, Recording, Settings, measure

SHORT = Settings(rounds=4, warmup=1, sample_ms=0.01)


def nothing() -> None:
    pass


def unit(call: Callable[[], object] = nothing) -> Case:
    return Case(UNIT, "the unit", call)


def fail() -> None:
    raise ValueError("refused\nand more")


def test_every_round_times_every_case_once_and_every_other_round_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    plain = [unit(lambda: order.append("unit")), Case("b", "", lambda: order.append("b"))]
    monkeypatch.setattr("iree_marshal.bench.harness._calibrate", lambda case, sample_ns: 1)
    recording = measure(plain, settings=SHORT)
    # The unit once more before every other case.
    assert order == ["unit", "b", "unit", "unit", "unit", "b"] * 2 + ["unit", "b", "unit"]
    assert {name: len(rounds) for name, rounds in recording.host.items()} == {UNIT: 4, "b": 4}
    for name in (UNIT, "b"):
        assert all(
            0 < host <= drained for host, drained in zip(recording.host[name], recording.drained[name], strict=True)
        )


def test_calls_fill_the_sample() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    measure([unit(call)], settings=Settings(rounds=1, warmup=0, sample_ms=1.0))
    # Far fewer would mean that a sample is one call; the clock of a busy machine decides how many exactly.
    assert calls > 50


def test_the_process_is_as_before() -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        seen.update(gc=gc.isenabled(), threads=torch.get_num_threads(), grad=torch.is_grad_enabled())
        seen["cores"] = len(os.sched_getaffinity(0))

    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(2)
    try:
        measure([unit(look)], settings=SHORT)
        assert seen == {"gc": False, "threads": 1, "grad": False, "cores": 1}
        with pytest.raises(RuntimeError, match="ours failed"):
            measure([unit(), Case("ours", "", fail)], settings=SHORT)
        assert (gc.isenabled(), torch.get_num_threads(), torch.is_grad_enabled()) == (True, 2, True)
        assert os.sched_getaffinity(0) == cores
    finally:
        torch.set_num_threads(threads)


def test_cases_are_made_before_the_thread_is_pinned() -> None:
    cores = os.sched_getaffinity(0)
    seen = []

    def made() -> Any:
        seen.append(os.sched_getaffinity(0))
        yield unit()

    measure(made(), settings=SHORT)
    assert seen == [cores]


def test_what_is_optional_may_fail() -> None:
    figures = [
        Derived("figure", "", lambda one: one["stock"] / one[UNIT], "x"),
        Derived("not asked for", "", lambda one: one["absent"], "x"),
        Derived("share", "", lambda one: one[UNIT] / one[UNIT], "x"),
    ]
    recording = measure([unit(), Case("stock", "", fail, optional=True)], figures, settings=SHORT)
    assert recording.skipped == {"stock": "ValueError: refused", "figure": "needs stock"}
    assert recording.derived["share"]["rounds"] == [1.0] * 4
    assert "not asked for" not in recording.derived


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match=r"the unit floor.detach is not among the cases"):
        measure([Case("b", "", nothing)], settings=SHORT)
    with pytest.raises(ValueError, match="two cases are named b"):
        measure([unit(), Case("b", "", nothing), Case("b", "", nothing)], settings=SHORT)


def test_a_case_may_say_what_counts() -> None:
    counts = itertools.count(1)
    timed = Case("timed", "", lambda: next(counts) * 1000, 1, "call", own_clock=True)
    recording = measure([unit(), timed], settings=Settings(rounds=1, warmup=0, sample_ms=1.0))
    called = next(counts) - 1
    repetitions = round(2 * (called - recording.host["timed"][0] / 1000)) + 1
    assert repetitions > 1
    assert recording.host["timed"] == [sum(range(called - repetitions + 1, called + 1)) * 1000 / repetitions]


def recorded(unit_ns: list[float], b_ns: list[float]) -> Recording:
    """One process in which a call of the unit took 400 tensors, and one of b two."""
    times = {UNIT: [400 * ns for ns in unit_ns], "b": [2 * ns for ns in b_ns]}
    before = dict.fromkeys(times, times[UNIT])
    about = {"title": "a title", "per": "tensor", "unlike": "", "over": "", "optional": False}
    described = {UNIT: about | {"count": 400}, "b": about | {"count": 2, "unlike": "copies the data"}}
    derived = {"figure": {"title": "a figure", "unit": "x", "rounds": b_ns}}
    return Recording(
        described,
        times,
        times,
        times,
        before,
        derived,
        {"memory": {"title": "m", "unit": "b", "value": 1.0, "iqr": 0.0}},
    )


def test_ratios_are_of_the_same_moment() -> None:
    # b is always twice the unit, although both drift by a factor of a hundred between rounds and processes.
    recordings = [recorded([1, 10, 100], [2, 20, 200]), recorded([3, 30, 300], [6, 60, 600])]
    made = report.summarize(recordings, SHORT, torch.device("cpu"))
    b = made["cases"]["b"]
    assert (b["ratio"], b["ratio_iqr"], b["thread_ratio"]) == (2, 0, 2)
    assert (b["median"], made["unit"]["ns"], b["unit_ns"]) == (40, 20, 20)
    assert b["iqr"] == pytest.approx(165 - 9.5)
    assert made["derived"]["figure"]["value"] == 40
    assert made["derived"]["memory"]["value"] == 1
    assert (made["schema"], made["device"], made["settings"]["processes"]) == (1, "cpu", 2)
    assert made["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(made)) == made


def test_a_case_that_failed_in_one_process_is_left_out() -> None:
    second = recorded([1], [2])
    del second.cases["b"], second.host["b"], second.derived["figure"]
    second.skipped["b"] = "RuntimeError: no"
    made = report.summarize([recorded([1], [2]), second], SHORT, torch.device("cpu"))
    assert list(made["cases"]) == [UNIT]
    assert made["skipped"] == {"b": "RuntimeError: no"}
    assert "figure" not in made["derived"]


def test_the_table_marks_what_is_not_like_for_like() -> None:
    made = report.summarize([recorded([100.0], [20_000.0])], SHORT, torch.device("cpu"))
    made["skipped"]["stock"] = "UNAVAILABLE"
    text = report.table(made)
    assert (
        "| `b` | a title | tensor | 20.0 us | 0.0 ns | 200.000 | 0.000 |  | not like for like: copies the data |"
        in text
    )
    assert f"| `{UNIT}` | a title | tensor | 100.0 ns | 0.0 ns | 1.000 | 0.000 |  |  |" in text
    assert "| `stock` | UNAVAILABLE |" in text
    assert "| `memory` | m | 1.000 | 0.000 | b |" in text


def test_what_a_call_takes_over_the_bare_invocation() -> None:
    slow = torch.zeros(64, 64)
    recording = measure(
        [
            unit(),
            Case("bare", "", slow.sum, 1, "call"),
            Case("call", "", lambda: [slow.sum()] * 1, 1, "call", over="bare"),
        ],
        settings=SHORT,
    )
    bare, call = recording.host["bare"], recording.host["call"]
    expected = [(b / a - 1) * 100 for a, b in zip(bare, call, strict=True)]
    assert recording.derived["over.call.percent"]["rounds"] == pytest.approx(expected)
    assert recording.derived["over.call.us"]["unit"] == "us"
    made = report.summarize([recording], SHORT, torch.device("cpu"))
    row = next(line for line in report.table(made).splitlines() if line.startswith("| `call`"))
    assert f"| {made['derived']['over.call.us']['value']:.1f} us, " in row
    assert "over.call" not in row


@pytest.mark.parametrize(
    ("patterns", "kept"), [([], [UNIT, "import.ours", "b"]), (["import.*"], [UNIT, "import.ours"])]
)
def test_patterns(patterns: list[str], kept: list[str]) -> None:
    offered = [unit(), Case("import.ours", "", nothing), Case("b", "", nothing)]
    assert [case.name for case in bench.select(offered, patterns)] == kept


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--sample-ms", "0"]])
def test_settings_that_measure_nothing(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="--rounds must be at least 1"):
        bench.main(["--quick", *options])


def test_memory_per_imported_tensor(fast: None) -> None:
    found = memory.memory_per_import(cases.Fixture(), 2000)
    assert 0 < found["memory.live"]["value"] <= 400
    # A few blocks of other threads may come and go meanwhile.
    assert found["memory.left"]["value"] < 2


def test_memory_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.memory_per_import(cases.Fixture(), 1) == {}


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    options = ["bench", "--quick", "--rounds", "2", "--sample-ms", "0.2", "--json", str(path)]
    assert command_line.main(options) == 0
    made = json.loads(path.read_text())
    table = capsys.readouterr().out
    for name in (
        "import.ours",
        "import.portable",
        "import.stock.to_dlpack",
        "import.stock.dunder",
        "import.stock.copy",
        "export.imported.ours",
        "export.imported.stock",
        "scaling.import.1",
        "scaling.export.400",
    ):
        row = made["cases"][name]
        assert row["median"] > 0, name
        assert f"| `{name}` |" in table
    assert made["skipped"] == {}
    assert {"flat.import.400", "flat.export.400", "speedup.import", "memory.live"} <= made["derived"].keys()
    assert made["cases"]["import.stock.copy"]["unlike"] == "copies the data"
    assert made["path"].split(",")[0] == paths.status().path
