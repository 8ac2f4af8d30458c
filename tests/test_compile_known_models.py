# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""torch.compile: transformers' own models, with random weights, are right within 1e-3 of their largest value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import Graphs, compile_
from torch import nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

_IDS = (2, 12)


def _mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), {"input": torch.randn(8, 64)}


def _resnet50() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return transformers.ResNetModel(transformers.ResNetConfig()), {"pixel_values": torch.randn(1, 3, 224, 224)}


def _bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    mask = torch.ones(_IDS, dtype=torch.int64)
    mask[1, 7:] = 0
    return transformers.BertModel(config), {"input_ids": torch.randint(0, 128, _IDS), "attention_mask": mask}


def _gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 128, _IDS)}


def _llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 128, _IDS)}


@pytest.mark.parametrize("make", [_mlp, _resnet50, _bert, _gpt2, _llama], ids=lambda make: make.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_it_is_right(
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp(), "compiled")))
    torch.manual_seed(0)
    graphs = Graphs(monkeypatch)
    model, inputs = make()
    model.eval().requires_grad_(False)
    run = compile_(model)
    eager = model(**inputs)
    wanted = [eager] if isinstance(eager, torch.Tensor) else list(eager.values())
    for _ in range(3):
        output = run(**inputs)
        results = [output] if isinstance(output, torch.Tensor) else list(output.values())
        assert len(results) == len(wanted)
        for ours, theirs in zip(results, wanted, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.stride() == theirs.stride()
            assert float((ours - theirs).abs().max()) <= 1e-3 * float(theirs.abs().max())
    # One graph, through IREE: nothing of the model was left to eager.
    assert len(graphs.compiled) == 1
    assert not graphs.eager
