# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native engine, which remembers, against the portable one, which starts anew: the same answers to any calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import executor_modules as modules
import torch
from executor_support import executor, live
from hypothesis import given, settings
from hypothesis import strategies as st

from iree_marshal.executor import Executor

SHAPES = [(4,), (1, 4), (2, 4), (4, 4), (0, 4), (64, 4), (4, 5), ()]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.int32, torch.float64]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, as lists; or the class and text of its error."""
    try:
        result = call()
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    results = result if isinstance(result, tuple) else (result,)
    return [(entry.dtype, entry.tolist()) if isinstance(entry, torch.Tensor) else entry for entry in results]


class Pool:
    """Tensors that are changed between calls in every way torch knows."""

    def __init__(self) -> None:
        self.tensors = [torch.ones(2, 4), torch.ones(4, 4), torch.zeros(4), torch.ones(1, 4)]

    def change(self, place: int, how: int, number: int) -> None:
        tensor = self.tensors[place]
        shape, dtype = SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)]
        if how == 0:
            self.tensors[place] = torch.full(shape, number, dtype=dtype)
        elif how == 1:
            tensor.fill_(number)
        elif how == 2:
            tensor.resize_(shape).fill_(number)
        elif how == 3:
            tensor.set_(torch.full(shape, number, dtype=tensor.dtype))  # type: ignore[call-overload]
        elif how == 4:
            tensor.data = torch.full(shape, number, dtype=dtype)
        elif how == 5 and tensor.dim() == 2:
            tensor.t_()
        elif how == 6:
            self.tensors[place] = tensor.view(tensor.shape)
        elif how == 7 and tensor.dtype.is_floating_point:
            self.tensors[place] = torch._neg_view(tensor)
        elif how == 8 and tensor.numel():
            self.tensors[place] = tensor.reshape(-1)[:4]
        elif how == 9 and tensor.dim() == 2:
            self.tensors[place] = tensor[1:]
        elif how == 10:
            self.tensors[place] = self.tensors[number % len(self.tensors)]


CHANGES = st.tuples(st.just("change"), st.integers(0, 3), st.integers(0, 10), st.integers(1, 40))
CALLS = st.tuples(st.just("call"), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.just(0), st.just(0))
BINDINGS = st.tuples(st.sampled_from(["bind", "unbind", "trim"]), st.integers(0, 1), st.integers(0, 3), st.just(0))
STEPS = st.lists(st.one_of(CHANGES, CALLS, CALLS, BINDINGS), min_size=4, max_size=25)


def run(native: Executor, portable: Executor, steps: list[Any]) -> int:
    """Do the same with both; returns how many calls went well."""
    pool = Pool()
    good = 0
    for what, first, second, number in steps:
        if what == "change":
            pool.change(first, second, number)
        elif what == "call":
            args = [pool.tensors[place] for place in first]
            ours, theirs = outcome(lambda args=args: native(*args)), outcome(lambda args=args: portable(*args))
            assert ours == theirs
            good += isinstance(ours, list)
        elif what == "bind":
            value = pool.tensors[second]
            ours = outcome(lambda value=value, first=first: native.bind({first: value}))
            assert ours == outcome(lambda value=value, first=first: portable.bind({first: value}))
        elif what == "unbind":
            assert outcome(lambda first=first: native.unbind([first])) == outcome(
                lambda first=first: portable.unbind([first])
            )
        else:
            native.trim()
    return good


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_arguments(steps: list[Any]) -> None:
    native = executor(modules.SUM_ROWS)
    run(native, executor(modules.SUM_ROWS, path="portable"), steps)
    native.unbind()
    native.trim()


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_arguments_of_a_function_without_signature(steps: list[Any]) -> None:
    # IREE itself refuses what does not fit, in the same words on both paths.
    native = executor(modules.TORCH_ADD)
    run(native, executor(modules.TORCH_ADD, path="portable"), steps)


OUTS = st.lists(st.integers(0, 5), min_size=2, max_size=2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), OUTS), st.integers(0, 99)), min_size=2, max_size=12))
def test_storage(steps: list[Any]) -> None:
    before = live()
    native, portable = executor(modules.STORAGE_PAIR), executor(modules.STORAGE_PAIR, path="portable")
    base = torch.zeros(64)
    tensors = [torch.zeros(16), torch.zeros(16), base[:16], base[16:32], base[8:24], torch.zeros(12)]
    for place, outs, number in steps:
        x = tensors[place]
        found = []
        for exe in (native, portable):
            out = None if outs is None else [tensors[index] for index in outs]
            # Both begin with the same memory, so that what was not written shows.
            for index, tensor in enumerate(tensors):
                if index != place:
                    tensor.fill_(-1.0)
            x.fill_(number)
            found.append(outcome(lambda exe=exe, x=x, out=out: exe(x, out=out)))
        assert found[0] == found[1]
    native.trim()
    del native, portable, exe, x
    assert live() == before
