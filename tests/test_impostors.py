# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Objects that are not what they claim to be: no crash, and the same answer on both paths."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import iree.runtime as rt
import pytest
import torch

import iree_marshal as im

pytestmark = pytest.mark.usefixtures("path")


def test_list_subclass_that_lies_about_its_length() -> None:
    class Long(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 100_000

    assert im.from_variant_list(im.to_variant_list(Long([1, 2]))) == [1, 2]
    assert im.from_variant_list(im.to_variant_list([Long([1, 2])])) == [[1, 2]]


def test_proxies_of_tensors() -> None:
    class Proxy:
        __class__ = property(lambda _: torch.Tensor)  # type: ignore[assignment]

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tensor, name)

    tensor = torch.ones(16)
    for proxy in (Proxy(tensor), weakref.proxy(tensor)):
        (result,) = im.from_variant_list(im.to_variant_list([proxy]))
        assert torch.equal(result, tensor)


def test_mock_of_a_list() -> None:
    im.to_variant_list([1])
    with pytest.raises((TypeError, AttributeError)):
        im.from_variant_list(mock.Mock(spec=rt.VmVariantList))


def test_hostile_subclass() -> None:
    class Hostile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("must not be asked")

    tensor = torch.ones(16)
    (result,) = im.from_variant_list(im.to_variant_list([tensor.as_subclass(Hostile)]))
    assert torch.equal(result, tensor)


def test_result_list_that_contains_itself() -> None:
    im.to_variant_list([1])
    variants = rt.VmVariantList(1)
    variants.push_list(variants)
    with pytest.raises(ValueError, match="or a list that contains itself"):
        im.from_variant_list(variants)


def test_parameter_without_a_shape_yet() -> None:
    with torch.no_grad(), pytest.raises(TypeError, match=r"^element 0: .* that is not initialised yet$"):
        im.to_variant_list([torch.nn.parameter.UninitializedParameter()])
