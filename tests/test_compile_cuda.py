# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile on a CUDA device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Graphs, assert_same, check, compile_
from test_compile_models import _MODELS
from torch import nn

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.mark.parametrize("name", _MODELS)
def test_models_and_their_training(name: str, graphs: Graphs) -> None:
    make, shape = _MODELS[name]
    eager_model = make().cuda()
    model = copy.deepcopy(eager_model)
    run = compile_(model)
    for _ in range(2):
        x = torch.randn(shape, device="cuda")
        ours, eager = run(x).square().mean(), eager_model(x).square().mean()
        assert_same(ours.detach(), eager.detach(), tolerance=1e-3)
        ours.backward()
        eager.backward()
    for mine, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-3, atol=1e-4)
    assert len(graphs.compiled) == 2
    assert not graphs.eager


@pytest.mark.parametrize("storage", [True, False])
def test_values(storage: bool) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        return x * 2, (x + 1).t(), x > 0, x.argmax(), x.clone(), x.to(torch.float16), x

    check(function, torch.randn(16, 8, device="cuda"), storage=storage, tolerance=1e-3)
    check(lambda x: (x + 1, x > 200), torch.arange(256).to(torch.uint8).cuda(), storage=storage)
    check(
        lambda x: x * 2, torch.randn(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last), storage=storage
    )
    check(lambda x: x + 1, torch.empty(0, 8, device="cuda"), storage=storage)


def test_python_floats_are_cpu_tensors_beside_cuda_ones(graphs: Graphs) -> None:
    run = compile_(lambda x, s: x * s)
    x = torch.randn(4, 4, device="cuda")
    for scale in (2.0, 3.0, -0.5, 2, 3):
        assert_same(run(x, scale), x * scale)
    assert not graphs.eager


@pytest.mark.parametrize("storage", [True, False])
def test_dynamic_sizes(storage: bool, graphs: Graphs) -> None:
    run = compile_(lambda x: (x.t() * x.shape[0], x.sum(0)), dynamic=True, storage=storage)
    for rows in (3, 9, 64):
        x = torch.randn(rows, 5, device="cuda")
        assert_same(run(x), (x.t() * rows, x.sum(0)), tolerance=1e-3)
    assert len(graphs.compiled) == 1


def test_work_queued_before_and_after_is_ordered() -> None:
    run = compile_(lambda x: x + 1, verify="never")
    run(torch.zeros(1024, device="cuda"))
    stream = torch.cuda.Stream()
    for value in range(20):
        with torch.cuda.stream(stream):
            x = torch.zeros(1024, device="cuda")
            torch.cuda._sleep(2_000_000)
            x += value
            y = run(x) * 2
            del x
            torch.empty(1024, device="cuda").fill_(-1)
        stream.synchronize()
        assert torch.equal(y, torch.full_like(y, 2.0 * (value + 1)))


def test_a_prefix_of_a_residual_net_is_as_right_as_eager() -> None:
    """Chains of convolutions are what IREE 3.13 miscompiles on CUDA without im2col."""
    layers = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(12)]
    )
    model = layers.eval().cuda()
    x = torch.randn(1, 16, 56, 56, device="cuda")
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        ours, eager = compile_(model)(x), model(x)
    assert (ours - exact).abs().max() <= 3 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
