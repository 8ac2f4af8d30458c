# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What iree_marshal.turbine does before iree-turbine comes into it."""

from __future__ import annotations

import sys

import pytest

from iree_marshal import turbine


def test_a_missing_turbine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iree.turbine", None)
    monkeypatch.setitem(sys.modules, "iree.turbine.runtime", None)
    monkeypatch.setitem(sys.modules, "iree.turbine.runtime.launch", None)
    with pytest.raises(ImportError, match="pip install iree-turbine"):
        turbine.accelerate()
    assert not turbine._active


@pytest.mark.parametrize(
    ("lines", "places"),
    [
        (["%0 = torch.aten.add.Tensor %arg0, %arg1, %int1"], set()),
        (["%0 = torch.aten.index_put %arg2, %i, %v, %false"], {2}),
        (["%0 = torch.aten.slice_scatter %arg1, %arg0, %int0"], {1}),
        (["%0 = torch.aten.view %arg3, %1", "%2 = torch.aten.scatter_add %0, %int0, %a, %b"], {3}),
        (["%0 = torch.aten.clone %arg3, %1", "%values, %indices = torch.aten.sort %0, %int0, %false"], {3}),
        (["%0 = torch.aten.mul.Tensor %arg3, %1", "%2 = torch.aten.scatter_add %0, %int0, %a, %b"], set()),
    ],
)
def test_updated_arguments_are_found_in_the_text(lines: list[str], places: set[int]) -> None:
    assert turbine.updated_arguments("\n".join(lines)) == places
