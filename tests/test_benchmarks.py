# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The runner runs, and what compares and checks its reports tells better from worse."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("a copy of the sources without the benchmarks", allow_module_level=True)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def script(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )


def row(ratio: float, **more: Any) -> dict[str, Any]:
    about = {"title": "t", "count": 400, "per": "tensor", "unlike": "", "over": "", "optional": False}
    return about | {"median": ratio * 100, "iqr": 1.0, "ratio": ratio, "ratio_iqr": 0.01} | more


def figure(value: float) -> dict[str, Any]:
    return {"title": "t", "unit": "x", "value": value, "iqr": 0.0}


def report(**more: Any) -> dict[str, Any]:
    made = {
        "schema": 1,
        "date": "2000-01-01 00:00 UTC",
        "device": "cpu",
        "path": "fast",
        "machine": {"processor": "a processor", "cores": 2},
        "versions": {"torch": "2.13"},
        "settings": {"rounds": 41},
        "unit": {"name": "floor.detach", "ns": 100.0},
        "cases": {
            "floor.detach": row(1.0),
            "import.ours": row(0.3),
            "import.stock.to_dlpack": row(2.0, optional=True),
            "export.ours": row(0.7),
        },
        "derived": {},
        "skipped": {},
    }
    return made | more


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_fails_past_the_threshold_only() -> None:
    before, after = report(), report()
    after["cases"]["import.ours"] = row(0.33)
    rows = {one.name: one for one in module("compare").deltas(before, after, 9.9)}
    assert rows["import.ours"].percent == pytest.approx(10)
    assert [name for name, one in rows.items() if one.slower] == ["import.ours"]
    assert not any(one.slower for one in module("compare").deltas(before, after, 10.1))
    assert not any(one.slower for one in module("compare").deltas(after, before, 9.9))


def test_compare_lets_stock_and_floor_be_slower() -> None:
    before, after = report(), report()
    after["cases"]["import.stock.to_dlpack"] = row(4.0, optional=True)
    before["cases"]["floor.to_dlpack"], after["cases"]["floor.to_dlpack"] = row(0.5), row(1.0)
    rows = {one.name: one for one in module("compare").deltas(before, after, 10)}
    assert rows["import.stock.to_dlpack"].percent == pytest.approx(100)
    assert not any(one.slower for one in rows.values())


def test_compare_marks_what_is_not_like_for_like() -> None:
    compare = module("compare")
    before, after = report(), report(path="portable", versions={"torch": "2.14", "numpy": "2"})
    after["cases"]["import.ours"] = row(0.3, count=500)
    after["cases"]["import.stock.to_dlpack"] = row(2.0, optional=True, unlike="copies the data")
    after["cases"]["new"] = row(1.0)
    del after["cases"]["export.ours"]
    text = compare.render(compare.deltas(before, after, 10), compare.surroundings(before, after))
    assert "| `import.ours` | 0.300 | 0.300 | +0.0 % | not like for like: count 400 / 500 |" in text
    assert "| `import.stock.to_dlpack` | 2.000 | 2.000 | +0.0 % | not like for like: copies the data |" in text
    assert "| `export.ours` | 0.700 | - | - | not like for like: only in one report |" in text
    assert "| `new` | - | 1.000 | - | not like for like: only in one report |" in text
    assert "differs: path: fast / portable\ndiffers: numpy: none / 2\ndiffers: torch: 2.13 / 2.14\n" in text


def test_compare_as_a_script(tmp_path: Path) -> None:
    before, after, other = (tmp_path / name for name in ("before.json", "after.json", "other.json"))
    changed = report()
    changed["cases"]["export.ours"] = row(1.4)
    before.write_text(json.dumps(report()))
    after.write_text(json.dumps(changed))
    other.write_text("{}")
    done = script("compare", before, after, "--threshold", "10")
    assert done.returncode == 1, done.stderr
    assert "| `export.ours` | 0.700 | 1.400 | +100.0 % | SLOWER |" in done.stdout
    assert done.stdout.endswith("slower by more than 10 %: export.ours\n")
    assert script("compare", before, after, "--threshold", "101").returncode == 0
    assert script("compare", before, before).returncode == 0
    assert "not a benchmark report of schema 1" in script("compare", before, other).stderr
    assert script("compare", before, tmp_path / "absent.json").returncode == 1


# --- check ------------------------------------------------------------------------------------------------------------


def complete(device: str) -> dict[str, Any]:
    """A report in which every number lies on its bar."""
    made = report(device=device)
    made["cases"] = {f"call.400x450.{kind}.bare": row(1.0, median=ns) for kind, ns in (("own", 1e6), ("storage", 2e6))}
    for bar in module("check").BARS:
        if device not in bar.devices:
            continue
        part, name, key = bar.key.split(":")
        made[part].setdefault(name.format(faster="own"), {})[key] = bar.first / bar.scale
    return made


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_check_passes_on_the_bar(device: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(complete(device)))
    done = script("check", path)
    assert done.returncode == 0, done.stdout
    assert "every bar is met" in done.stdout
    assert "FAIL" not in done.stdout
    assert "missing" not in done.stdout


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_check_fails_past_each_bar(device: str) -> None:
    check, made = module("check"), complete(device)
    held = [bar for bar in check.BARS if device in bar.devices]
    assert len(held) > 10
    for bar in held:
        part, name, key = bar.key.split(":")
        worse = copy.deepcopy(made)
        worse[part][name.format(faster="own")][key] *= 0.99 if bar.least else 1.01
        assert check.verdict(bar, check.find(worse, bar)) == "FAIL", bar
        del worse[part][name.format(faster="own")]
        assert check.verdict(bar, check.find(worse, bar)) == "missing", bar


def test_check_knows_goals_and_the_faster_way(tmp_path: Path) -> None:
    check, made = module("check"), complete("cuda")
    (bar,) = (bar for bar in check.BARS if bar.key.endswith("{faster}.known.percent:value"))
    made["derived"]["over.call.400x450.storage.known.percent"] = figure(bar.goal)
    assert check.verdict(bar, check.find(made, bar)) == "pass"
    made["cases"]["call.400x450.own.bare"]["median"] = 3e6
    assert check.verdict(bar, check.find(made, bar)) == "goal"
    del made["cases"]["call.400x450.own.bare"]
    assert check.find(made, bar) is None
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made))
    done = script("check", path)
    assert done.returncode == 1
    assert "missed" in done.stdout


# --- instructions -----------------------------------------------------------------------------------------------------

COUNTS = {"to_variant_list": 1000.0, "from_variant_list": 4000.0, "detach": 3000.0}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    instructions = module("instructions")
    path = tmp_path / "results" / "instructions.json"
    monkeypatch.setattr(instructions, "STORED", path)
    monkeypatch.setattr(instructions, "count", lambda folder: COUNTS)
    assert instructions.main([]) == 0
    return path


def test_instructions_are_kept_and_held(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instructions = module("instructions")
    kept = json.loads(stored.read_text())
    assert kept["instructions_per_tensor"] == COUNTS
    assert instructions.main(["--check"]) == 0
    monkeypatch.setattr(instructions, "count", lambda folder: COUNTS | {"to_variant_list": 1101.0, "detach": 9000.0})
    assert instructions.main(["--check"]) == 1
    assert "to_variant_list: 1101 instructions per tensor, +10.1 % over the stored 1000" in capsys.readouterr().out
    assert instructions.main(["--check", "--threshold", "11"]) == 0


def test_instructions_of_other_versions_are_held_per_detach(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instructions = module("instructions")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"torch": "2.10"}))
    monkeypatch.setattr(instructions, "count", lambda folder: {loop: 2 * count for loop, count in COUNTS.items()})
    assert instructions.main(["--check"]) == 0
    assert ", stored with 2.10" in capsys.readouterr().out
    monkeypatch.setattr(instructions, "count", lambda folder: COUNTS | {"from_variant_list": 5010.0})
    assert instructions.main(["--check"]) == 1
    assert "5010 instructions per tensor, +25.2 % per `t.detach()` over the stored 4000" in capsys.readouterr().out


def test_instructions_say_what_is_missing(tmp_path: Path) -> None:
    done = script("instructions", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "counting instructions needs valgrind and a C compiler\n")


# `make test` in CI fetches it.
@pytest.mark.skipif(
    shutil.which("valgrind") is None and not os.environ.get("CI"), reason="counting instructions needs valgrind"
)
def test_the_hot_loops_take_no_more_instructions_than_recorded() -> None:
    recorded = json.loads(module("instructions").STORED.read_text())
    assert recorded["instructions_per_tensor"].keys() == COUNTS.keys()
    done = script("instructions", "--check", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stdout + done.stderr


# --- programs, peers, plots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "results"), [(2, 1), (2, 2), (31, 450), (40, 45), (400, 450)])
def test_programs_have_as_many_sums_as_results(inputs: int, results: int) -> None:
    programs = module("programs")
    pairs = [programs.operands(place, inputs) for place in range(results)]
    assert all(0 <= a < inputs and 0 <= b < inputs for a, b in pairs)
    distinct = len({tuple(sorted(pair)) for pair in pairs})
    # Two inputs have but one sum.
    assert distinct == (results if inputs > 2 else 1)
    text = programs.sums(inputs, results, storage=True)
    assert text.count("iree.abi.output") == results
    assert "iree.abi.output" not in programs.sums(inputs, results, storage=False)


def test_absent_peers_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from iree_marshal.bench.cases import Fixture

    peers = module("peers")
    for name in ("tvm_ffi", "onnxruntime", "iree.turbine.runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    skipped: dict[str, str] = {}
    assert list(peers.peer_cases(Fixture(), skipped)) == []
    assert skipped.keys() == {"peer.tvm_ffi", "peer.onnxruntime", "peer.turbine"}
    assert all(reason.startswith("ModuleNotFoundError: ") for reason in skipped.values())


def test_arguments_of_the_compiled_program_are_in_its_order() -> None:
    loaded = module("compiled").Loaded(fixed={0: "w0", 2: "w2"}, passed=["x1", "x3"])
    assert loaded.arguments() == ["w0", "x1", "w2", "x3"]


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots, made = module("plots"), report()
    assert [path.name for path in plots.draw(made, tmp_path, "cpu")] == ["cpu-stock.svg"]
    for count in (1, 10):
        made["cases"][f"scaling.import.{count}"] = row(0.3, count=count)
        made["cases"][f"scaling.import.stock.{count}"] = row(2.0, count=count)
    made["cases"]["call.400x450.own.bare"] = made["cases"]["call.400x450.own.known"] = row(9.0, median=1e6)
    made["derived"]["over.call.400x450.own.known.us"] = figure(100.0)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        names = [path.name for path in plots.draw(made, folder, "cpu")]
        assert names == ["cpu-scaling.svg", "cpu-stock.svg", "cpu-share.svg"]
    for name in names:
        # The same numbers make the same file: a commit of results shows what changed.
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert "a processor, 2000-01-01" in (first / name).read_text()
    assert "9.1 %" in (first / "cpu-share.svg").read_text()
    path = first / "other.json"
    path.write_text(json.dumps(made))
    assert plots.main([str(path)]) == 0
    assert (first / "other-share.svg").read_bytes() == (first / "cpu-share.svg").read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.draw(made, tmp_path, "cpu") == []
    assert plots.main([str(path)]) == 1


# --- the runner -------------------------------------------------------------------------------------------------------


def test_smoke(tmp_path: Path) -> None:
    """Every case once, with real programs, in two processes."""
    options = [
        "--quick",
        "--rounds",
        "2",
        "--sample-ms",
        "0.2",
        "--processes",
        "2",
        "--into",
        str(tmp_path / "results"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"IREE_MARSHAL_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "results" / "cpu-quick.json").read_text())
    assert made["settings"]["processes"] == 2
    names = made["cases"].keys()
    for way in ("bare", "new", "known", "bound", "by_hand", "stock"):
        assert {f"call.2x2.own.{way}", f"call.40x45.own.{way}"} <= names
    for way in ("bare", "new", "known", "bound", "bound_reuse", "known_reuse", "known_out"):
        assert {f"call.2x2.storage.{way}", f"call.40x45.storage.{way}"} <= names
    assert {"export.ours", "export.stock", "compiled.mlp.ours", "compiled.mlp.bare"} <= names
    assert {"executor.argument.bound", "executor.result.storage.reuse", "over.compiled.mlp.ours.us"} <= made[
        "derived"
    ].keys()
    assert all(name.startswith("peer.") for name in made["skipped"]), made["skipped"]
    assert (tmp_path / "results" / "cpu-quick.md").read_text() in done.stdout
    for kind in ("scaling", "stock"):  # a smoke run has no call of 400 tensors to draw
        assert f"drawn: cpu-quick-{kind}.svg\n" in done.stdout
        assert (tmp_path / "results" / f"cpu-quick-{kind}.svg").stat().st_size > 0
    for size in (1, 10, 100, 400):
        assert {f"scaling.{way}.{size}" for way in ("import", "import.stock", "export", "export.stock")} <= names
    again = script("check", tmp_path / "results" / "cpu-quick.json")
    # The longest lists are not in a smoke run; everything else has a number.
    missing = [line for line in again.stdout.splitlines() if line.endswith("| missing |")]
    assert len(missing) == 4
    assert all("1000 over 100" in line or "10000 over 100" in line for line in missing)


def test_only_some_cases(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", "import.ours", "--into", str(tmp_path), "--no-plots"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "cpu-quick.json").read_text())
    assert list(made["cases"]) == ["floor.detach", "import.ours"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-quick.json", "cpu-quick.md"]


# --- two GPUs ---------------------------------------------------------------------------------------------------------


def test_two_gpus_are_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.two_gpus"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "two GPUs are needed: torch.cuda.device_count() is 0"


def test_cases_beside_a_busy_gpu_differ_in_what_it_does_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from iree_marshal.bench.cases import Fixture
    from iree_marshal.bench.harness import Settings, measure
    from iree_marshal.bench.report import summarize

    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    two_gpus = module("two_gpus")
    touched = {"look": 0, "keep_busy": 0}

    class Other:
        def look(self) -> None:
            touched["look"] += 1

        def keep_busy(self) -> None:
            touched["keep_busy"] += 1

    settings = Settings(rounds=2, warmup=0, sample_ms=0.5, quick=True)
    fixture = Fixture("cpu", quick=True)
    made = measure(two_gpus.busy_cases(fixture, Other()), two_gpus.busy_derived(), settings=settings)
    assert min(touched.values()) > 2 * len(two_gpus.CALLS)
    report = summarize([made], settings, fixture.torch)
    assert set(report["derived"]) == {f"busy.{name}" for name in two_gpus.CALLS}
    for name in two_gpus.CALLS:
        assert report["cases"][f"{name}.busy"]["per"] == report["cases"][f"{name}.idle"]["per"]


def test_throughput_of_workers_that_share_nothing_and_of_workers_that_share_all() -> None:
    import threading
    import time

    two_gpus = module("two_gpus")
    lock = threading.Lock()

    def apart(calls: int) -> None:
        time.sleep(0.02 * calls)

    def sharing(calls: int) -> None:
        for _ in range(calls):
            with lock:
                time.sleep(0.02)

    assert two_gpus.throughput([apart, apart], 3, 5)["value"] > 1.6
    assert two_gpus.throughput([sharing, sharing], 3, 5)["value"] < 1.4

    def failing(calls: int) -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        two_gpus.throughput([apart, failing], 1, 1)


def test_each_bar_of_two_gpus_is_held() -> None:
    two_gpus = module("two_gpus")
    good = {"busy.import": figure(1.1), "busy.call.2x2": figure(0.9), "two.threads": figure(1.9)}
    assert two_gpus.verdicts({"derived": good}) == []
    for name, worse in (("busy.import", 1.11), ("busy.call.2x2", 1.2), ("two.threads", 1.89)):
        (missed,) = two_gpus.verdicts({"derived": good | {name: figure(worse)}})
        assert missed.startswith(f"{name}: ")
