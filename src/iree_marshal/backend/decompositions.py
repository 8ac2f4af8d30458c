# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The one table of decompositions that a graph goes through before it is imported.

Neither torch's core table alone nor the importer's own list alone carries all of an MLP, ResNet-50, BERT, GPT-2 and
Llama; their union does. Attention kernels that torch picks per device (flash, efficient, cuDNN) are taken apart into
matrix products as well, because the importer knows none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Table = dict[Any, Callable[..., Any]]


def _beyond_core() -> list[Any]:
    """Operators that core ATen keeps, and that IREE's importer or compiler does not take as they are."""
    aten = torch.ops.aten
    return [
        aten.embedding_dense_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.slice_backward,
        aten.select_backward,
        aten.norm.ScalarOpt_dim,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten.upsample_bilinear2d.vec,
        aten.masked_fill.Tensor,
        aten.masked_fill.Scalar,
        aten.t,
        aten.addmm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
        aten._native_batch_norm_legit.no_stats,
        aten.native_batch_norm_backward,
        aten.squeeze.dims,
        aten.im2col,
        aten._adaptive_avg_pool2d,
        aten._prelu_kernel,
        aten.full,
        aten._log_softmax,
        aten._to_copy,
        aten.lift_fresh_copy,
        aten._unsafe_index.Tensor,
        aten.unbind.int,
        aten._scaled_dot_product_flash_attention_for_cpu,
    ]


@functools.cache
def table() -> Table:
    """Return the table, operator overload to Python decomposition, made once per process.

    Returns
    -------
    dict
        What ``aot_autograd(decompositions=...)`` takes. Callers must not change it.
    """
    from torch._decomp import core_aten_decompositions, get_decompositions

    union: Table = dict(core_aten_decompositions())
    union.update(get_decompositions(_beyond_core()))
    return union
