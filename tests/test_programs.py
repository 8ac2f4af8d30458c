# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs whose arguments and results are no plain tensors, called through iree.runtime on both paths and drivers."""

from __future__ import annotations

from typing import Any

import executor_modules as programs
import iree.runtime as rt
import modules
import pytest
import releases
import torch
from conftest import private_device

import iree_marshal as im

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def device(driver: str) -> Any:
    return private_device(driver)


def call(program: modules.Program, device: rt.HalDevice, *values: Any) -> list[Any]:
    return im.from_variant_list(program.invoke(im.to_variant_list(values, device=device)), device=device)


def test_nested_lists_and_nothing(device: Any) -> None:
    program = modules.Program(programs.LISTS, device)
    x = torch.arange(16.0)
    listed, nothing = call(program, device, [1, [x, None], [], 2.5], None)
    assert nothing is None
    assert [listed[0], listed[1][1], *listed[2:]] == [1, None, [], 2.5]
    assert torch.equal(listed[1][0], x)
    nothing, tensor = call(program, device, None, x)
    assert nothing is None
    assert tensor.data_ptr() == x.data_ptr()


def test_nothing_where_a_tensor_is_wanted(device: Any) -> None:
    program = modules.Program(modules.ADD, device)
    with pytest.raises(ValueError, match="INVALID_ARGUMENT"):
        call(program, device, torch.ones(4), None)


def test_results_written_into_the_callers_storage(device: Any, path: str) -> None:
    if path == "portable" and releases.NO_DISCARDING_WRITES:
        pytest.skip("on this release IREE's own import lets programs write only over what they have read")
    program = modules.Program(programs.STORAGE_BUFFER, device)
    y, z = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    storage = im.to_variant_list([y, z], device=device)
    buffers = [storage.get_as_object(index, rt.HalBufferView).get_buffer() for index in range(2)]
    results = call(program, device, torch.arange(4.0), *buffers)
    assert y.tolist() == z.tolist() == [0, 2, 4, 6]
    assert [result.data_ptr() for result in results] == [y.data_ptr(), z.data_ptr()]


def test_entry_with_fences(device: Any) -> None:
    program = modules.Program(programs.ADD, device, "main", programs.FENCES)
    ready, done = (rt.HalFence.create_at(device.create_semaphore(0), value) for value in (0, 1))
    arguments = im.to_variant_list([torch.ones(4), torch.arange(4.0), ready, done], device=device)
    outputs = program.invoke(arguments)
    done.wait()
    (result,) = im.from_variant_list(outputs, device=device)
    assert result.tolist() == [1, 2, 3, 4]


def test_sizes_known_at_the_call_only(device: Any) -> None:
    program = modules.Program(programs.DYNAMIC, device)
    for rows in (1, 3, 0, 100):
        x = torch.arange(rows * 4.0).reshape(rows, 4)
        (result,) = call(program, device, x)
        assert torch.equal(result, x + x)
