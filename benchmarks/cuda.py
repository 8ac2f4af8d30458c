# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cases that only a GPU has: adoption through the array interface, and what ordering costs."""

from __future__ import annotations

from collections.abc import Iterator

import iree.runtime as rt
import torch

import iree_marshal as im
from iree_marshal.bench.cases import Fixture
from iree_marshal.bench.harness import Case, Derived

__all__ = ["adoption_cases", "order_cases", "order_derived"]


def adoption_cases(fixture: Fixture, variants: rt.VmVariantList) -> Iterator[Case]:
    """Time results to torch through `HalArray.__cuda_array_interface__`, beside our own adoption.

    Parameters
    ----------
    fixture : Fixture
        The devices.
    variants : iree.runtime.VmVariantList
        Results of a program.
    """
    device, count = fixture.torch, len(variants)
    arrays = im.from_variant_list(variants, as_arrays=True)
    yield Case("adopt.ours", "`from_variant_list`", lambda: im.from_variant_list(variants), count)
    yield Case(
        "adopt.arrays",
        "`from_variant_list(as_arrays=True)`",
        lambda: im.from_variant_list(variants, as_arrays=True),
        count,
        unlike="no tensors",
    )
    yield Case(
        "adopt.as_tensor",
        "`torch.as_tensor(array)` through `__cuda_array_interface__`, arrays made beforehand",
        lambda: [torch.as_tensor(array, device=device) for array in arrays],
        count,
    )
    yield Case(
        "adopt.arrays_as_tensor",
        "`from_variant_list(as_arrays=True)`, then `torch.as_tensor`",
        lambda: [torch.as_tensor(array, device=device) for array in im.from_variant_list(variants, as_arrays=True)],
        count,
    )


def order_cases(fixture: Fixture) -> Iterator[Case]:
    """Time one import with and without making IREE's stream wait for torch's."""
    one = fixture.tensors(1)
    yield Case("order.on", "`to_variant_list([t])`", lambda: im.to_variant_list(one), 1, "call")
    yield Case(
        "order.off", "`to_variant_list([t], order=False)`", lambda: im.to_variant_list(one, order=False), 1, "call"
    )


def order_derived() -> Iterator[Derived]:
    """Yield what ordering costs a call."""
    yield Derived("order.us", "ordering, per call", lambda one: (one["order.on"] - one["order.off"]) / 1000, "us")
