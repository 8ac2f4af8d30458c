# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import iree.runtime as rt
import modules
import pytest
import torch

import iree_marshal
from iree_marshal import _lifetime, devices, paths


@pytest.fixture(scope="session", autouse=True)
def _modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    modules.use_folder(folder)
    return folder


@pytest.fixture(params=["fast", "portable"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on each path."""
    with paths.force(request.param):
        yield request.param


@pytest.fixture
def fast() -> Iterator[None]:
    """The test is about the native path."""
    with paths.force("fast"):
        yield


def private_device(driver: str) -> rt.HalDevice:
    """A HAL device of the test's own, not the process-wide one."""
    devices.vm_instance()
    return rt.get_driver(driver).create_default_device()


@pytest.fixture(params=["local-task", "local-sync"])
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def aligned() -> Callable[..., torch.Tensor]:
    """Makes tensors that can be imported in place: torch's allocator aligns to 64 bytes."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        tensor = torch.arange(count, dtype=torch.float32).to(dtype).reshape(shape)
        assert tensor.data_ptr() % 64 == 0
        return tensor

    return make


_before = (0, 0, 0)


def alive() -> tuple[int, ...]:
    """What `_lifetime.live_counts` counts, without what was alive before a test that uses `nothing_left`."""
    return tuple(now - then for now, then in zip(_lifetime.live_counts(), _before, strict=True))


@pytest.fixture
def nothing_left(fast: None) -> Iterator[None]:
    """After the test neither IREE nor torch may hold anything of the other that was not held before."""
    global _before
    if "torch._dynamo" in sys.modules:
        # Compiled functions of other tests, which hold their parameters: they would go at any time.
        torch._dynamo.reset()
    gc.collect()
    _before = _lifetime.live_counts()
    yield
    gc.collect()
    left = alive()
    _before = (0, 0, 0)
    assert left == (0, 0, 0)


@pytest.fixture
def roundtrip() -> Callable[[torch.Tensor], torch.Tensor]:
    """Through a list and back."""

    def cross(tensor: torch.Tensor) -> torch.Tensor:
        (result,) = iree_marshal.from_variant_list(iree_marshal.to_variant_list([tensor]))
        assert isinstance(result, torch.Tensor)
        return result

    return cross
