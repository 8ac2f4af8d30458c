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


def _constant_pad_nd(x: torch.Tensor, pad: list[int], value: float = 0) -> Any:
    """Cut where padding is negative (the backward of padding): IREE takes it for a slice that starts before zero."""
    if all(amount >= 0 for amount in pad):
        return NotImplemented
    for place in range(len(pad) // 2):
        dim = x.dim() - 1 - place
        before, after = min(pad[2 * place], 0), min(pad[2 * place + 1], 0)
        if before or after:
            x = x.narrow(dim, -before, x.shape[dim] + before + after)
    rest = [max(amount, 0) for amount in pad]
    return torch.ops.aten.constant_pad_nd.default(x, rest, value) if any(rest) else x.clone()


def _convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    """Take apart the backward of a transposed convolution, which IREE has no lowering for.

    A transposed convolution is the gradient of a plain one. So its gradient by the input is that plain convolution, and
    its gradient by the weight is the plain one's, with input and output gradient in each other's place.
    """
    if not transposed:
        return NotImplemented
    aten = torch.ops.aten
    by_input = by_weight = by_bias = None
    if output_mask[0]:
        by_input = aten.convolution.default(
            gradient, weight, None, stride, padding, dilation, False, [0] * len(stride), groups
        )
    if output_mask[1]:
        by_weight = aten.convolution_backward.default(
            x, gradient, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False]
        )[1]
    if output_mask[2]:
        by_bias = gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])
    return by_input, by_weight, by_bias


def _padded(x: torch.Tensor, dim: int, before: Any, after: Any) -> torch.Tensor:
    padded: torch.Tensor = torch.ops.aten.constant_pad_nd.default(
        x, [0, 0] * (x.dim() - 1 - dim) + [before, after], 0.0
    )
    return padded


def _slice_backward(gradient: torch.Tensor, sizes: list[Any], dim: int, start: Any, end: Any, step: Any) -> Any:
    """Pad instead of writing into zeros: IREE 3.13 lets two such writes share their zeros where sizes are dynamic."""
    dim = dim % len(sizes)
    if step != 1 or not isinstance(start, int) or start < 0 or gradient.shape[dim] == 0:
        return NotImplemented
    return _padded(gradient, dim, start, sizes[dim] - start - gradient.shape[dim])


def _select_backward(gradient: torch.Tensor, sizes: list[Any], dim: int, index: Any) -> Any:
    """Pad instead of writing into zeros, as above."""
    dim = dim % len(sizes)
    if not isinstance(index, int):
        return NotImplemented
    place = index if index >= 0 else index + sizes[dim]
    return _padded(gradient.unsqueeze(dim), dim, place, sizes[dim] - place - 1)


def _avg_pool2d_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Spread the gradient over each window, as a transposed convolution with ones.

    IREE has no lowering for the operator itself.
    """
    kernel = list(kernel_size) * (2 // len(kernel_size))
    steps = list(stride or kernel_size) * (2 // len(stride or kernel_size))
    edges = list(padding) * (2 // len(padding))
    windows_differ = ceil_mode or (any(edges) and not count_include_pad and not divisor_override)
    if windows_differ or x.dim() != 4 or not all(isinstance(size, int) for size in x.shape):
        return NotImplemented
    divisor = divisor_override or kernel[0] * kernel[1]
    # What a row of windows does not reach at the far edge.
    missed = [
        x.shape[2 + dim] - ((gradient.shape[2 + dim] - 1) * steps[dim] - 2 * edges[dim] + kernel[dim])
        for dim in range(2)
    ]
    reach = [0 if 0 <= amount < step else amount for amount, step in zip(missed, steps, strict=True)]
    if any(reach):
        return NotImplemented
    # Channels go into the batch: IREE's lowering of transposed convolutions with as many groups as channels is broken.
    ones = torch.ones((1, 1, *kernel), dtype=gradient.dtype, device=gradient.device)
    planes = (gradient / divisor).reshape(-1, 1, *gradient.shape[2:])
    spread = torch.ops.aten.convolution.default(planes, ones, None, steps, edges, [1, 1], True, missed, 1)
    return spread.reshape(x.shape)


def _var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Compute variance and mean in the precision torch does: IREE's own lowering goes through float64, even on a GPU.

    That is slow where it compiles; for CUDA it mostly does not ("failed to distribute"), layer norms included.
    """
    if x.is_complex():
        return NotImplemented
    dims = list(range(x.dim())) if not dim else [one % x.dim() for one in dim]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    count: Any = 1
    for one in dims:
        count = count * x.shape[one]
    freedom = count - (1 if correction is None else correction)
    if isinstance(freedom, (int, float)):
        freedom = max(freedom, 0)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    variance = (centred * centred).sum(dims, keepdim=keepdim) / freedom
    return variance.to(x.dtype), (mean if keepdim else mean.squeeze(dims)).to(x.dtype)


def _var(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    both = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]


def _std(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    both = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0].sqrt()


def _maximum(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Keep a NaN of either operand: IREE compares and selects, which drops that of the first."""
    if x.dtype != y.dtype or not x.is_floating_point():
        return NotImplemented
    return torch.where((x > y) | (x != x), x, y)


def _minimum(x: torch.Tensor, y: torch.Tensor) -> Any:
    if x.dtype != y.dtype or not x.is_floating_point():
        return NotImplemented
    return torch.where((x < y) | (x != x), x, y)


def _clamp(x: torch.Tensor, low: float | None = None, high: float | None = None) -> Any:
    """Keep a NaN, as above. A bound compares false with it."""
    if not x.is_floating_point():
        return NotImplemented
    if low is not None:
        x = torch.where(x < low, low, x)
    if high is not None:
        x = torch.where(x > high, high, x)
    return x.clone() if low is None and high is None else x


def _clamp_low(x: torch.Tensor, low: float) -> Any:
    return _clamp(x, low)


def _clamp_high(x: torch.Tensor, high: float) -> Any:
    return _clamp(x, None, high)


def _hardtanh(x: torch.Tensor, low: float = -1.0, high: float = 1.0) -> Any:
    return _clamp(x, low, high)


def _clamp_tensor(x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None) -> Any:
    if not x.is_floating_point() or any(bound is not None and bound.dtype != x.dtype for bound in (low, high)):
        return NotImplemented
    if low is not None:
        x = torch.maximum(x, low)
    if high is not None:
        x = torch.minimum(x, high)
    return x.clone() if low is None and high is None else x


def _roll(x: torch.Tensor, shifts: list[int], dims: list[int] | None = None) -> Any:
    """Cut and join: torch's own goes through the remainder of an index, which the compiler does not take."""
    if not dims:
        return torch.roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if not isinstance(shift, int):
            return NotImplemented
        if isinstance(size, int):
            split = -shift % size if size else 0
        elif abs(shift) < size:
            split = size - shift if shift > 0 else -shift
        else:
            return NotImplemented
        if not isinstance(split, int) or split:
            x = torch.cat([x.narrow(dim, split, size - split), x.narrow(dim, 0, split)], dim)
    return x.clone()


def _empty_permuted(size: list[int], physical_layout: list[int], **more: Any) -> Any:
    """Permute what is row-major in storage order: the compiler makes only that."""
    places = [physical_layout.index(dim) for dim in range(len(size))]
    return torch.empty([size[dim] for dim in physical_layout], **more).permute(places)


def _fmod(x: torch.Tensor, y: Any) -> Any:
    """Of integers. In floating point, a quotient rounded before its product is subtracted would be another result."""
    dtypes = [x.dtype, y.dtype] if isinstance(y, torch.Tensor) else [x.dtype]
    if any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes) or isinstance(y, float):
        return NotImplemented
    if not isinstance(y, torch.Tensor):
        # As a tensor, for a size that is not known: the compiler divides by those only.
        y = torch.full((), y, dtype=x.dtype, device=x.device)
    return x - torch.div(x, y, rounding_mode="trunc") * y


_MOST_FACTORS = 8


def _pow(x: torch.Tensor, exponent: float) -> Any:
    """Multiply out small powers of integers: the compiler only raises floating-point numbers to a power."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        return NotImplemented
    if not isinstance(exponent, int) or not 1 <= exponent <= _MOST_FACTORS:
        return NotImplemented
    result = x
    for _ in range(exponent - 1):
        result = result * x
    return result.clone() if exponent == 1 else result


def _bitwise_xor(x: torch.Tensor, y: Any) -> Any:
    """Make a tensor of the number: the compiler takes the operator with two tensors only."""
    if isinstance(y, bool) and x.dtype != torch.bool:
        return NotImplemented
    return torch.bitwise_xor(x, torch.full((), y, dtype=x.dtype, device=x.device))


def _max_pool2d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> Any:
    """Give a single image a batch of one: the compiler's lowering has no other."""
    if x.dim() != 3:
        return NotImplemented
    # Two numbers each: the compiler crashes on one.
    window, edges, gaps = (list(one) * (2 // len(one)) for one in (kernel_size, padding or [0], dilation or [1]))
    steps = list(stride or window) * (2 // len(stride or window))
    values, indices = torch.ops.aten.max_pool2d_with_indices.default(
        x.unsqueeze(0), window, steps, edges, gaps, ceil_mode
    )
    return values.squeeze(0), indices.squeeze(0)


def _avg_pool2d(x: torch.Tensor, *more: Any) -> Any:
    """Give a single image a batch of one, as above."""
    return torch.ops.aten.avg_pool2d.default(x.unsqueeze(0), *more).squeeze(0) if x.dim() == 3 else NotImplemented


def _any(x: torch.Tensor, *more: Any) -> Any:
    """Ask whether a byte is zero: the compiler joins the bytes of uint8 themselves."""
    return (x != 0).any(*more).to(torch.uint8) if x.dtype == torch.uint8 else NotImplemented


def _or_else(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition that is `first`, or `second` where that says no."""

    def either(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return either


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
    aten = torch.ops.aten
    ours: Table = {
        aten.constant_pad_nd.default: _constant_pad_nd,
        aten.convolution_backward.default: _convolution_backward,
        aten.slice_backward.default: _slice_backward,
        aten.select_backward.default: _select_backward,
        aten.avg_pool2d_backward.default: _avg_pool2d_backward,
        aten.var_mean.correction: _var_mean,
        aten.var.correction: _var,
        aten.std.correction: _std,
        aten.maximum.default: _maximum,
        aten.minimum.default: _minimum,
        aten.clamp.default: _clamp,
        aten.clamp.Tensor: _clamp_tensor,
        aten.clamp_min.default: _clamp_low,
        aten.clamp_max.default: _clamp_high,
        aten.hardtanh.default: _hardtanh,
        aten.roll.default: _roll,
        aten.empty_permuted.default: _empty_permuted,
        aten.fmod.Scalar: _fmod,
        aten.fmod.Tensor: _fmod,
        aten.pow.Tensor_Scalar: _pow,
        aten.bitwise_xor.Scalar: _bitwise_xor,
        aten.max_pool2d_with_indices.default: _max_pool2d,
        aten.avg_pool2d.default: _avg_pool2d,
        aten.any.default: _any,
        aten.any.dim: _any,
        aten.any.dims: _any,
    }
    for operator, function in ours.items():
        union[operator] = _or_else(function, union[operator]) if operator in union else function
    return union
