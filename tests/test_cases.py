# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults that people met in the field, with the right answers: real modules, invoked through iree.runtime itself."""

from __future__ import annotations

import gc
import sys
from typing import Any

import modules
import numpy as np
import pytest
import releases
import torch
from conftest import private_device

import iree_marshal as im

pytestmark = pytest.mark.usefixtures("path")


def call(program: modules.Program, *values: Any, **options: Any) -> list[Any]:
    return im.from_variant_list(program.invoke(im.to_variant_list(values, **options)))


@pytest.fixture
def device(driver: str) -> Any:
    return private_device(driver)


def test_c01_two_results_of_one_allocation(device: Any) -> None:
    program = modules.Program(modules.TWO_RESULTS, device)
    a, b = torch.arange(7.0), torch.arange(5.0)
    first, second = call(program, a, b, device=device)
    assert torch.equal(first, a + a)
    assert torch.equal(second, b * b)
    del first
    gc.collect()
    others = [call(program, a + 1, b + 1, device=device) for _ in range(20)]
    assert torch.equal(second, b * b)
    assert len(others) == 20


def test_c02_argument_that_the_function_computes_in(device: Any) -> None:
    program = modules.Program(modules.MATMUL_INTO_ARGUMENT, device)
    a, b, c = torch.ones(8, 8), torch.ones(8, 8), torch.full((8, 8), 3.0)
    original = c.clone()
    (result,) = call(program, a, b, c, device=device, copy=True)
    assert torch.equal(result, original + a @ b)
    assert torch.equal(c, original)


def test_c03_result_that_is_an_argument(device: Any) -> None:
    program = modules.Program(modules.IDENTITY, device)
    x = torch.arange(4.0)
    (y,) = call(program, x, device=device)
    pointer = x.data_ptr()
    del x
    gc.collect()
    assert y.data_ptr() == pointer
    assert torch.equal(y + 1, torch.arange(4.0) + 1)
    twice = modules.Program(modules.TWICE, device)
    first, second = call(twice, torch.arange(4.0), device=device)
    first[0] = 9
    assert second[0] == 9


def test_c04_many_calls_free_each_owner_once(device: Any) -> None:
    program = modules.Program(modules.ADD, device)
    a = torch.arange(4.0)
    before = sys.getrefcount(a)
    for step in range(500):
        (result,) = call(program, a, torch.full((4,), float(step)), device=device)
        assert result[1].item() == step + 1
    im.to_variant_list([a, a], device=device)  # dropped without being invoked
    with pytest.raises(TypeError):
        im.to_variant_list([a, object()], device=device)
    del result
    gc.collect()
    assert sys.getrefcount(a) == before


@pytest.mark.parametrize("count", [64, 2000])
def test_c07_many_tensors(count: int) -> None:
    tensors = [torch.full((4,), float(index)) for index in range(count)]
    results = im.from_variant_list(im.to_variant_list(tensors))
    assert [int(result[0]) for result in results] == list(range(count))


@releases.CRASHES_ON_UNREAD_ARGUMENTS
def test_c15_empty_tensors_in_a_program(device: Any) -> None:
    program = modules.Program(modules.EMPTY_RESULT, device)
    empty, other = call(program, torch.empty(0, 3), torch.ones(4), device=device)
    assert empty.shape == (0, 3)
    assert torch.equal(other, torch.full((4,), 2.0))


def test_c15_empty_tensors() -> None:
    for tensor in (torch.empty(1, 8, 0, 128), torch.empty(4, 4)[:0].t()):
        (result,) = im.from_variant_list(im.to_variant_list([tensor], copy=False))
        assert result.shape == tensor.shape


def test_c17_rank_0(device: Any) -> None:
    (result,) = call(modules.Program(modules.RANK_0, device), torch.tensor(3.0), device=device)
    assert result.shape == ()
    assert result.item() == 6.0


def test_c18_offsets() -> None:
    backing = bytearray(np.arange(20, dtype=np.float32).tobytes())
    for tensor in (torch.arange(64.0)[1:33], torch.frombuffer(backing, dtype=torch.float32, offset=4)):
        (result,) = im.from_variant_list(im.to_variant_list([tensor]))
        assert torch.equal(result, tensor)


def test_c19_bool(device: Any) -> None:
    tensor = torch.tensor([True, False, True, True])
    (result,) = call(modules.Program(modules.NOT, device), tensor, device=device)
    assert result.dtype is torch.bool
    assert torch.equal(result, ~tensor)


def test_c20_bfloat16(device: Any) -> None:
    tensor = torch.tensor([1.5, -2.0, 0.25, 3.0], dtype=torch.bfloat16)
    program = modules.Program(modules.BFLOAT16, device)
    (array,) = im.from_variant_list(program.invoke(im.to_variant_list([tensor], device=device)), as_arrays=True)
    assert array.dtype is torch.bfloat16
    assert not hasattr(array, "__array_interface__")
    assert torch.equal(array.torch(), tensor + tensor)


def test_c21_float8_kinds_stay_apart() -> None:
    content = torch.arange(256, dtype=torch.uint8)
    kinds = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
    results = im.from_variant_list(im.to_variant_list([content.view(kind) for kind in kinds]))
    assert [result.dtype for result in results] == kinds
    assert all(torch.equal(result.view(torch.uint8), content) for result in results)


def test_c23_conjugate_and_negative_views(device: Any) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j, 5j, 1])
    program = modules.Program(modules.ADD, device)
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    (result,) = call(program, imaginary, torch.zeros(4), device=device)
    assert result.tolist() == [-2.0, 4.0, -5.0, 0.0]


def test_c33_results_outlive_all(device: Any) -> None:
    program = modules.Program(modules.TWO_RESULTS, device)
    outputs = program.invoke(im.to_variant_list([torch.ones(7), torch.ones(5)], device=device))
    first, second = im.from_variant_list(outputs, device=device)
    del program, outputs, device
    gc.collect()
    churn = [torch.full((64,), -1.0) for _ in range(64)]
    assert first.sum().item() == 14.0
    assert second.sum().item() == 5.0
    assert len(churn) == 64


@releases.NO_F64_SCALARS
@releases.NO_CONVERTED_SCALARS
def test_c38_scalars_keep_their_places(device: Any) -> None:
    assert call(modules.Program(modules.SCALARS, device), 21, 1.25, device=device) == [42, 2.5]
    assert call(modules.Program(modules.SMALL_SCALARS, device), 7, 0.5, device=device) == [7, 0.5]
