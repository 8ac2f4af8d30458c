# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cases that call a program: results out, whole calls, and what an argument and a result cost an `Executor`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import iree.runtime as rt
import torch
from torch.utils.dlpack import to_dlpack

import iree_marshal as im
from benchmarks.cuda import adoption_cases
from benchmarks.programs import Program, load
from iree_marshal.bench.cases import TENSORS, Fixture, dlpack_device, export_cases, stock_export, stock_import
from iree_marshal.bench.harness import Case, Derived, unit_before

__all__ = ["bare", "call_cases", "call_derived", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """How many tensors go in and out. Two lengths each: what a call costs on its own cancels in the difference."""

    arguments: tuple[int, int] = (100, 400)
    results: tuple[int, int] = (150, 450)
    whole: tuple[tuple[int, int], ...] = ((2, 2), (400, 450))


# Programs that compile in a second, for smoke runs.
QUICK = Sizes((10, 40), (15, 45), ((2, 2), (40, 45)))
# The fewest inputs whose pairs give 450 different sums.
RESULT_INPUTS = 31
WAYS = ("new", "known", "bound")
# An executor may remember its last call; three sets in turn are never remembered.
SETS = 3


def sizes_of(fixture: Fixture) -> Sizes:
    """Return the sizes of a run."""
    return QUICK if fixture.quick else Sizes()


def executor(program: Program, fixture: Fixture, **options: Any) -> Any:
    """Make an executor for a program."""
    return im.Executor(program.context, program.function, device=fixture.hal, **options)


def bound(program: Program, fixture: Fixture, tensors: list[torch.Tensor], **options: Any) -> Any:
    """Make an executor with every input bound."""
    made = executor(program, fixture, **options)
    made.bind(dict(enumerate(tensors[: program.inputs])))
    return made


def rotating(call: Callable[..., object], fixture: Fixture, count: int) -> Callable[[], object]:
    """Call with other tensors than in the last calls."""
    sets = itertools.cycle([fixture.fresh(count) for _ in range(SETS)])
    return lambda: call(*next(sets))


def calling(call: Callable[..., object], tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Call with the same tensors each time."""
    return lambda: call(*tensors)


def bare(name: str, program: Program, fixture: Fixture, tensors: list[torch.Tensor]) -> Case:
    """Time the invocation alone, with arguments imported beforehand and a fresh list for the results."""
    arguments = program.arguments(tensors, fixture)
    kind = "storage arguments" if program.storage else "IREE's own allocation"
    what = f"bare `context.invoke`, {program.inputs} in, {program.results} out, {kind}"
    return Case(name, what, lambda: program.invoke(arguments), 1, "call")


def border(executor: Any, call: Callable[[], object]) -> Callable[[], int]:
    """Time a call without its invocation, and the drop of its results: nanoseconds.

    The invocation of a program with hundreds of arguments or results takes long and differs by more than the border
    costs; `Executor.last_timing` says how long it took, and it is taken off.
    """

    def timed() -> int:
        start = time.perf_counter_ns()
        results = call()
        del results
        return time.perf_counter_ns() - start - executor.last_timing.invoke

    return timed


def argument_cases(fixture: Fixture) -> Iterator[Case]:
    """Time the border of calls with many arguments and one result."""
    for count in sizes_of(fixture).arguments:
        program, tensors = load(fixture, count, 1, storage=False), fixture.tensors(count)
        new = executor(program, fixture, timing=True)
        known = executor(program, fixture, timing=True)
        fixed = bound(program, fixture, tensors, timing=True)
        for way, called, call in (
            ("new", new, rotating(new, fixture, count)),
            ("known", known, calling(known, tensors)),
            ("bound", fixed, fixed),
        ):
            title = f"`Executor` without the invocation, {count} {way} tensors"
            yield Case(f"arguments.{count}.{way}", title, border(called, call), 1, "call", own_clock=True)


def dropped(program: Program, arguments: rt.VmVariantList) -> Callable[[], int]:
    """Time what the border of a call contains and a bare invocation costs as well: letting go of IREE's results."""

    def timed() -> int:
        results = program.invoke(arguments)
        start = time.perf_counter_ns()
        del results
        return time.perf_counter_ns() - start

    return timed


def result_cases(fixture: Fixture) -> Iterator[Case]:
    """Time the border of calls with few arguments, all bound, and many results."""
    tensors = fixture.tensors(RESULT_INPUTS)
    for count in sizes_of(fixture).results:
        own = load(fixture, RESULT_INPUTS, count, storage=False)
        storage = load(fixture, RESULT_INPUTS, count, storage=True)

        def case(way: str, how: str, call: Callable[[], int], count: int = count) -> Case:
            title = f"`Executor` without the invocation, {count} results{how}"
            return Case(f"results.{count}.{way}", title, call, 1, "call", own_clock=True)

        for kind, program in (("own", own), ("storage", storage)):
            title = f"drop of the result list of a bare `context.invoke`, {count} results"
            dropping = dropped(program, program.arguments(tensors, fixture))
            yield Case(f"results.{count}.{kind}.drop", title, dropping, 1, "call", own_clock=True)
        views = bound(own, fixture, tensors, timing=True)
        yield case("own.views", " in IREE's own allocation", border(views, views))
        views = bound(storage, fixture, tensors, timing=True)
        yield case("storage.views", " as views of a slab", border(views, views))
        reused = bound(storage, fixture, tensors, timing=True, reuse_outputs=True)
        yield case("storage.reuse", ", `reuse_outputs=True`", border(reused, reused))
        given = bound(storage, fixture, tensors, timing=True)
        yield case("storage.out", ", `out=[...]`", border(given, into(given, fixture, count)))


def into(call: Callable[..., object], fixture: Fixture, count: int, *tensors: torch.Tensor) -> Callable[[], object]:
    """Call with the caller's own results, the same each time."""
    out = fixture.fresh(count)
    return lambda: call(*tensors, out=out)


def by_hand(program: Program, fixture: Fixture, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Call the way of an executor of one's own: import, invoke, export."""
    inputs = tensors[: program.inputs]
    return lambda: im.from_variant_list(program.invoke(im.to_variant_list(inputs, device=fixture.hal)))


def stock(program: Program, fixture: Fixture, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Call the stock way through DLPack."""
    inputs = tensors[: program.inputs]
    kind, index = dlpack_device(fixture.torch)
    return lambda: stock_export(fixture.hal, program.invoke(stock_import(fixture.hal, inputs, to_dlpack)), kind, index)


def whole_cases(fixture: Fixture) -> Iterator[Case]:
    """Time whole calls: tensors to tensors."""
    for inputs, results in sizes_of(fixture).whole:
        tensors = fixture.tensors(inputs)
        for kind, storage in (("own", False), ("storage", True)):
            program = load(fixture, inputs, results, storage=storage)
            where, what = (
                f"call.{inputs}x{results}.{kind}",
                f"{inputs} in, {results} out, " + ("storage arguments" if storage else "IREE's own allocation"),
            )

            def case(
                way: str, how: str, call: Callable[[], object], where: str = where, what: str = what, **more: Any
            ) -> Case:
                return Case(f"{where}.{way}", f"{how}, {what}", call, 1, "call", over=f"{where}.bare", **more)

            yield bare(f"{where}.bare", program, fixture, tensors)
            yield case("new", "`Executor`, new tensors", rotating(executor(program, fixture), fixture, inputs))
            yield case("known", "`Executor`, known tensors", calling(executor(program, fixture), tensors))
            yield case("bound", "`Executor`, bound tensors", bound(program, fixture, tensors))
            if storage:
                reused = bound(program, fixture, tensors, reuse_outputs=True)
                yield case("bound_reuse", "`Executor`, bound tensors, reused outputs", reused)
                reused = executor(program, fixture, reuse_outputs=True)
                yield case("known_reuse", "`Executor`, known tensors, reused outputs", calling(reused, tensors))
                given = into(executor(program, fixture), fixture, results, *tensors)
                yield case("known_out", "`Executor`, known tensors, `out=[...]`", given)
            else:
                yield case(
                    "by_hand", "`to_variant_list`, `invoke`, `from_variant_list`", by_hand(program, fixture, tensors)
                )
                yield case(
                    "stock",
                    "stock: `to_dlpack` in, invoke, `torch.from_dlpack` out",
                    stock(program, fixture, tensors),
                    optional=True,
                )
            if inputs > 2 and not storage:
                variants = program.invoke(program.arguments(tensors, fixture))
                yield from export_cases(fixture, variants, "export", "results of a program")
                if fixture.cuda:
                    yield from adoption_cases(fixture, variants)


def call_cases(fixture: Fixture) -> Iterator[Case]:
    """Yield every case that needs compiled programs."""
    inline = fixture.inline()
    yield from argument_cases(inline)
    yield from result_cases(inline)
    yield from whole_cases(fixture)


def slope(name: str, title: str, group: str, lengths: tuple[int, int], way: str, floor: str = "") -> Derived:
    """Derive what one more tensor costs at the border, in units, from calls of two lengths.

    Parameters
    ----------
    name, title : str
        Of the figure.
    group : str
        ``arguments`` or ``results``: the cases are named ``group.length.way``.
    lengths : tuple of int
        The shorter and the longer.
    way, floor : str
        The call, and what it contains that a bare invocation costs as well; empty: nothing.
    """
    short, long = lengths

    def over(one: Mapping[str, float], length: int) -> float:
        return one[f"{group}.{length}.{way}"] - (one[f"{group}.{length}.{floor}"] if floor else 0.0)

    def value(one: Mapping[str, float]) -> float:
        unit = sum(one[unit_before(f"{group}.{length}.{way}")] for length in lengths) / len(lengths) / TENSORS
        return (over(one, long) - over(one, short)) / (long - short) / unit

    return Derived(name, title, value, "x detach")


def call_derived(fixture: Fixture) -> Iterator[Derived]:
    """Yield the figures over the cases of this file."""
    sizes = sizes_of(fixture)
    for way in WAYS:
        title = f"`Executor`: one more {way} argument"
        yield slope(f"executor.argument.{way}", title, "arguments", sizes.arguments, way)
    for way, how in (
        ("own.views", "a view of IREE's own allocation"),
        ("storage.views", "a view of a slab"),
        ("storage.reuse", "with `reuse_outputs`"),
        ("storage.out", "with `out=`"),
    ):
        yield slope(
            f"executor.result.{way}",
            f"`Executor`: one more result, {how}",
            "results",
            sizes.results,
            way,
            f"{way.split('.')[0]}.drop",
        )
