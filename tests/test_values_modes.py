# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Elements met inside the caller's modes and transforms, and of classes with operators of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import iree_marshal as im

pytestmark = pytest.mark.usefixtures("path")


class Forbidding(torch.Tensor):
    """Has memory of its own, and operators that must not be run."""

    @staticmethod
    def __new__(cls: type[Forbidding], tensor: torch.Tensor) -> Forbidding:
        return torch.Tensor._make_subclass(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run")


class Wrapper(torch.Tensor):
    """Has no memory."""

    @staticmethod
    def __new__(cls: type[Wrapper], *shape: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run")


class ForbiddingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run")


class ForbiddingFunctions(TorchFunctionMode):
    """Names of devices and attributes may be asked for: no mode answers them differently."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device or getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        raise AssertionError(f"{func} was run")


def under(mode: Any) -> Callable[[Callable[[], Any]], Any]:
    def run(function: Callable[[], Any]) -> Any:
        with mode():
            return function()

    return run


def inside(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], Any]:
    """Run a function inside a transform of torch.func; it sees tensors from outside."""

    def run(function: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def transformed(x: torch.Tensor) -> torch.Tensor:
            results.append(function())
            return x.sum()

        transform(transformed)(torch.ones(3))
        return results[0]

    return run


SURROUNDINGS = {
    "fake mode": under(FakeTensorMode),
    "lenient fake mode": under(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "dispatch mode": under(ForbiddingDispatch),
    "function mode": under(ForbiddingFunctions),
    "default device": under(lambda: torch.device("meta")),
    "grad": inside(torch.func.grad),
    "vmap": inside(torch.func.vmap),
    "functionalize": inside(torch.func.functionalize),
    "inference mode": under(torch.inference_mode),
    "nothing": under(contextlib.nullcontext),
}
surroundings = pytest.mark.parametrize("run", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())

VALUES: dict[str, Callable[[], Any]] = {
    "in place": lambda: torch.arange(16.0),
    "unaligned": lambda: torch.arange(64.0)[1:17],
    "transposed": lambda: torch.arange(16.0).reshape(4, 4).t(),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch._neg_view(torch.arange(16.0)),
    "numpy": lambda: np.arange(16.0),
    "numpy, reversed": lambda: np.arange(16.0)[::-1],
    "operators of its own": lambda: Forbidding(torch.arange(16.0)),
    "operators of its own, transposed": lambda: Forbidding(torch.arange(16.0).reshape(4, 4).t()),
}


@surroundings
@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("kind", VALUES)
def test_arguments(run: Callable[[Callable[[], Any]], Any], kind: str, copy: bool | None) -> None:
    value = VALUES[kind]()
    variants = run(lambda: im.to_variant_list([value], copy=copy))
    (result,) = im.from_variant_list(variants)
    assert type(result) is torch.Tensor
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy())
    with torch._C._DisableTorchDispatch():
        expected = value.detach().resolve_conj().resolve_neg().tolist()
        shared = result.data_ptr() == value.data_ptr()
    assert result.tolist() == expected
    assert shared is (copy is None and kind in ("in place", "operators of its own"))


@surroundings
def test_results(run: Callable[[Callable[[], Any]], Any]) -> None:
    tensor = torch.arange(16.0)
    variants = im.to_variant_list([tensor])
    (result,) = run(lambda: im.from_variant_list(variants))
    (array,) = run(lambda: im.from_variant_list(variants, as_arrays=True))
    for found in (result, array.torch()):
        assert type(found) is torch.Tensor
        assert not torch._C._functorch.is_functorch_wrapped_tensor(found)
        assert found.data_ptr() == tensor.data_ptr()
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("shape", [(3,), (0,), ()], ids=str)
def test_wrappers_are_refused_whatever_their_shape(shape: tuple[int, ...]) -> None:
    text = (
        r"^element 0: expected a dense tensor with memory, got a Wrapper that is a subclass without storage of its own$"
    )
    with pytest.raises(TypeError, match=text):
        im.to_variant_list([Wrapper(*shape)])
