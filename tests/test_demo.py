# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo: right on the real model, and not silent when it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iree_marshal import demo


class _Small(torch.nn.Module):
    """Stands in for ResNet-50 where only the demo's own logic is tested; has the same outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

        hidden = torch.relu(self.convolution(x))
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden, pooler_output=hidden.mean((2, 3), keepdim=True)
        )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IREE_MARSHAL_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = _Small().eval().requires_grad_(False)
    monkeypatch.setattr(demo, "build_model", lambda device: (model, torch.randn(1, 3, 16, 16)))


@pytest.mark.usefixtures("small")
def test_it_compares_and_shows_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu", "--runs", "2", "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("right:") == 2
    for way in ("to_dlpack + from_dlpack_capsule", "__dlpack__", "iree_marshal.to_variant_list", "from_variant_list"):
        assert way in printed


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = demo.call
    monkeypatch.setattr(demo, "call", lambda program: [value + 1 for value in right(program)])
    assert demo.main(["--device", "cpu", "--runs", "1", "--rounds", "1"]) == 1
    assert "WRONG: the program's call" in capsys.readouterr().out


def test_errors_are_relative_and_shapes_count() -> None:
    x = torch.tensor([1.0, 100.0])
    assert demo.relative_error([x + 1], [x]) == pytest.approx(0.01)
    assert demo.relative_error([x[:1]], [x]) == float("inf")
    assert demo.relative_error([x * float("nan")], [x]) == float("inf")
