# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The portable path by itself: public calls only, nothing lost on any way a call can end."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import iree.runtime as rt
import modules
import numpy as np
import pytest
import torch

import iree_marshal as im
from iree_marshal import paths, portable


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    with paths.force("portable"):
        yield


ALONE = """
import sys
import torch
import iree_marshal as im
from iree_marshal import paths
tensor = torch.arange(16.0)
values = [tensor, None, 3, 2.5, [tensor.to(torch.float8_e4m3fn), ()], torch.empty(0, 3)]
variants = im.to_variant_list(values)
results = im.from_variant_list(variants)
assert results[0].data_ptr() == tensor.data_ptr()
assert results[1:4] == [None, 3, 2.5]
assert results[4][0].dtype is torch.float8_e4m3fn
assert results[5].shape == (0, 3)
assert paths.status().path == "portable"
crossing = {"iree_marshal._importing", "iree_marshal._exporting", "iree_marshal._objects", "iree_marshal._probe"}
print(sorted(crossing & set(sys.modules)))
kept = variants, results
"""


def test_alone_without_native_code_and_out_of_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE],
        env={"IREE_MARSHAL_PATH": "portable", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_nothing_among_values() -> None:
    variants = im.to_variant_list([None, 1, None, [None, None], None])
    assert repr(variants).count("None") == 5
    assert im.from_variant_list(variants) == [None, 1, None, [None, None], None]


def test_nothing_where_the_runtime_has_no_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_null", None)
    monkeypatch.delattr(rt, "PyModuleInterface")
    text = r"^element 1\[0\]: None needs the native path: iree.runtime has no public call for a null reference$"
    with pytest.raises(NotImplementedError, match=text):
        im.to_variant_list([1, [None]])


def test_result_list_that_contains_itself() -> None:
    program = modules.Program(modules.RANK_0, im.hal_device("cpu"))
    variants = rt.VmVariantList(2)
    variants.push_int(1)
    # An invocation empties the list of its results, and with it the circle, which would never be freed.
    variants.push_list(variants)
    try:
        with pytest.raises(ValueError, match=r"^element 1: lists nested deeper than 64, or a list that contains it"):
            im.from_variant_list(variants)
    finally:
        program.context.invoke(program.function, im.to_variant_list([torch.ones(())]), variants)


def test_depth_that_goes_in_comes_out() -> None:
    nested: Any = 7
    for _ in range(64):
        nested = [nested]
    assert im.from_variant_list(im.to_variant_list([nested])) == [nested]


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("nested", [False, True])
def test_failure_at_every_element(bad: int, nested: bool) -> None:
    tensors = [torch.ones(16) for _ in range(4)]
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    values: list[Any] = list(tensors)
    values[bad] = [tensors[bad], [object()]] if nested else object()
    place = rf"{bad}\[1\]\[0\]" if nested else str(bad)
    with pytest.raises(TypeError, match=f"^element {place}: expected a torch.Tensor"):
        im.to_variant_list(values)
    del values
    gc.collect()
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    assert len(alive) == 4


class Counted:
    """An array whose owner can be watched: torch keeps it as long as the memory is used."""

    def __init__(self, value: float) -> None:
        self.array = np.full(16, value, np.float32)
        self.__array_interface__ = self.array.__array_interface__


def watched(value: float) -> tuple[torch.Tensor, weakref.ref[Counted]]:
    owner = Counted(value)
    return torch.from_numpy(np.asarray(owner)), weakref.ref(owner)


def test_memory_lives_as_long_as_anything_uses_it() -> None:
    tensor, alive = watched(3.0)
    assert tensor.data_ptr() % 16 == 0
    variants = im.to_variant_list([tensor], copy=None if tensor.data_ptr() % 64 else False)
    zero_copy = tensor.data_ptr() % 64 == 0
    del tensor
    gc.collect()
    assert (alive() is not None) is zero_copy
    (result,) = im.from_variant_list(variants)
    (array,) = im.from_variant_list(variants, as_arrays=True)
    del variants
    gc.collect()
    view = result[4:]
    del result
    assert view.tolist() == [3.0] * 12
    del view
    assert array.torch().tolist() == [3.0] * 16
    del array
    gc.collect()
    assert alive() is None


def test_list_that_shrinks_while_it_is_converted() -> None:
    values: list[Any] = [torch.ones(16)]

    class Shrinking:
        def __dlpack__(self, **options: Any) -> Any:
            values.clear()
            return torch.ones(16).__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    values += [Shrinking(), torch.ones(16)]
    with pytest.raises(RuntimeError, match="the list changed its length while it was converted"):
        im.to_variant_list(values)


def test_offset_of_a_result_is_in_its_pointer() -> None:
    """Both results lie in one allocation of IREE's."""
    program = modules.Program(modules.TWO_RESULTS, im.hal_device("cpu"))
    a, b = torch.arange(7.0), torch.arange(5.0)
    outputs = program.invoke(im.to_variant_list([a, b]))
    first, second = im.from_variant_list(outputs)
    assert first.storage_offset() == second.storage_offset() == 0
    assert torch.equal(first, a + a)
    assert torch.equal(second, b * b)
    del outputs, first
    gc.collect()
    assert torch.equal(second, b * b)
