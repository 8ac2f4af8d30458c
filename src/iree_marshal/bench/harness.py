# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rounds of timings: every round times every case once.

A ratio then compares what ran within the same moment: machines drift by more than the
differences that matter, and shared ones change their speed from one second to the next.
The unit is one `t.detach()`, which makes numbers comparable between machines; it is timed
again before every case.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

__all__ = ["UNIT", "Case", "Derived", "Recording", "Settings", "measure", "unit_before"]

UNIT = "floor.detach"
# Of a case's sample, what the unit before it gets.
UNIT_SHARE = 0.25


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes
    ----------
    name : str
        Stable: results of different versions are compared by it.
    title : str
        What is timed, for the table.
    call : callable
        Does it once. What it returns is dropped inside the timed interval, so that
        destruction counts.
    count : int
        How many tensors (or calls) one `call` handles; reported times are per one of them.
    per : str
        What `count` counts.
    unlike : str
        Why the row is not like for like with the others of its group; empty where it is.
    over : str
        The case that this one does the same as and more; what it takes over it is derived.
    optional : bool
        A stock or peer way that may not work here: a failure is a skipped row. A failure
        of any other case ends the run.
    own_clock : bool
        `call` returns the nanoseconds that count; the rest of its time, which is not of
        interest and louder than what is, does not.
    """

    name: str
    title: str
    call: Callable[[], object]
    count: int = 400
    per: str = "tensor"
    unlike: str = ""
    over: str = ""
    optional: bool = False
    own_clock: bool = False


@dataclass(frozen=True)
class Derived:
    """A figure computed in every round from the times of that round.

    Attributes
    ----------
    name, title : str
        As in `Case`.
    value : callable
        Maps the round's nanoseconds per call, by case name, to the figure.
    unit : str
        What the figure is in.
    """

    name: str
    title: str
    value: Callable[[Mapping[str, float]], float]
    unit: str


@dataclass(frozen=True)
class Settings:
    """How long to measure: `rounds` kept after `warmup` discarded ones, `sample_ms` for each case in each."""

    rounds: int = 41
    warmup: int = 2
    sample_ms: float = 12.0
    quick: bool = False


@dataclass
class Recording:
    """The rounds of one process: nanoseconds per call by case (see `Sample`), figures, and what was left out.

    `unit` has what a call of the unit took just before each case.
    """

    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    drained: dict[str, list[float]] = field(default_factory=dict)
    thread: dict[str, list[float]] = field(default_factory=dict)
    unit: dict[str, list[float]] = field(default_factory=dict)
    derived: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Nanoseconds per call of one sample.

    Attributes
    ----------
    host : float
        Until the calls had returned.
    drained : float
        Until the device was idle as well.
    thread : float
        That this thread spent on a processor: what the calls cost the host where other work
        shares the machine. Time spent waiting, for IREE's workers or the device, is not in it.
    """

    host: float
    drained: float
    thread: float


def _sample(case: Case, repetitions: int, synchronize: Callable[[], None]) -> Sample:
    if case.own_clock:
        synchronize()
        counted = sum(case.call() for _ in itertools.repeat(None, repetitions)) / repetitions  # type: ignore[misc]
        return Sample(counted, counted, counted)
    call = case.call
    clock, thread_clock = time.perf_counter_ns, time.thread_time_ns
    synchronize()
    thread_start = thread_clock()
    start = clock()
    for _ in itertools.repeat(None, repetitions):
        call()
    host = clock() - start
    thread = thread_clock() - thread_start
    synchronize()
    drained = clock() - start
    return Sample(host / repetitions, drained / repetitions, thread / repetitions)


def _calibrate(case: Case, sample_ns: float) -> int:
    """How many calls fill a sample; the first call warms up and is where an unusable case fails."""
    case.call()
    repetitions = 1
    while True:
        start = time.perf_counter_ns()
        _sample(case, repetitions, lambda: None)
        elapsed = time.perf_counter_ns() - start
        if elapsed >= sample_ns / 4:
            return max(1, round(sample_ns / elapsed * repetitions))
        repetitions *= 2


def unit_before(name: str) -> str:
    """Name what the unit took just before a case, among the times of a round."""
    return f"{UNIT} before {name}"


def pin() -> None:
    """Keep this thread on one core, where the platform can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def measure(
    cases: Iterable[Case],
    derived: Iterable[Derived] = (),
    *,
    settings: Settings,
    synchronize: Callable[[], None] = lambda: None,
) -> Recording:
    """Time every case once per round.

    Parameters
    ----------
    cases : iterable of Case
        One of them must be the unit.
    derived : iterable of Derived
        Left out where a case that it needs was left out.
    settings : Settings
        How many rounds, and how long a sample is.
    synchronize : callable
        Waits for the device.

    Returns
    -------
    Recording
        Every kept round.

    Notes
    -----
    Every other round goes backwards: neighbours stay neighbours, and what a case leaves in
    the caches does not always meet the same successor.
    """
    recording = Recording()
    threads = torch.get_num_threads()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            # Compilers and devices start threads of their own here, which must not inherit the one core.
            made = list(cases)
            pin()
            gc.collect()
            gc.disable()
            planned = _plan(made, settings, recording)
            rounds = _rounds(planned, settings, synchronize)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
    for name in recording.cases:
        recording.host[name] = [one[name].host for one in rounds]
        recording.drained[name] = [one[name].drained for one in rounds]
        recording.thread[name] = [one[name].thread for one in rounds]
        recording.unit[name] = [one[unit_before(name)].host for one in rounds]
    host = [{name: sample.host for name, sample in one.items()} for one in rounds]
    over = itertools.chain.from_iterable(_over(case) for case, _ in planned if case.over)
    for figure in itertools.chain(derived, over):
        try:
            values = [figure.value(one) for one in host]
        except KeyError as missing:
            # A case that was not asked for is no news; one that failed is.
            if missing.args[0] in recording.skipped:
                recording.skipped[figure.name] = f"needs {missing.args[0]}"
            continue
        recording.derived[figure.name] = {"title": figure.title, "unit": figure.unit, "rounds": values}
    return recording


def _over(case: Case) -> Iterator[Derived]:
    """Derive by how much a case exceeds the one that it contains."""
    call, floor = case.name, case.over
    title = f"`{call}` over `{floor}`"
    yield Derived(f"over.{call}.percent", title, lambda one: (one[call] / one[floor] - 1) * 100, "%")
    yield Derived(f"over.{call}.us", title, lambda one: (one[call] - one[floor]) / 1000, "us")


def _plan(cases: Iterable[Case], settings: Settings, recording: Recording) -> list[tuple[Case, int]]:
    planned = []
    for case in cases:
        if case.name in recording.cases:
            raise ValueError(f"two cases are named {case.name}")
        try:
            repetitions = _calibrate(case, settings.sample_ms * 1e6)
        except Exception as error:
            if not case.optional:
                raise RuntimeError(f"{case.name} failed") from error
            recording.skipped[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        planned.append((case, repetitions))
        recording.cases[case.name] = {
            part.name: getattr(case, part.name) for part in fields(case) if part.name not in ("name", "call")
        }
    if UNIT not in recording.cases:
        raise ValueError(f"the unit {UNIT} is not among the cases")
    return planned


def _rounds(
    planned: list[tuple[Case, int]], settings: Settings, synchronize: Callable[[], None]
) -> list[dict[str, Sample]]:
    rounds = []
    unit, unit_repetitions = next((case, repetitions) for case, repetitions in planned if case.name == UNIT)
    unit_repetitions = max(1, round(unit_repetitions * UNIT_SHARE))
    for number in range(settings.warmup + settings.rounds):
        one = {}
        for case, repetitions in planned if number % 2 else planned[::-1]:
            if case is not unit:
                one[unit_before(case.name)] = _sample(unit, unit_repetitions, synchronize)
            one[case.name] = _sample(case, repetitions, synchronize)
        one[unit_before(UNIT)] = one[UNIT]
        if number >= settings.warmup:
            rounds.append(one)
    return rounds
