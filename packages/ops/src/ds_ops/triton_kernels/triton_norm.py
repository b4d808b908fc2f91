"""A residual sum between two norms, in one kernel: what stands between any two products of a decoder layer.

    x' = x + post(delta)      delta: what attention or the feed-forward part gave; post: a norm of it, or nothing
    y  = pre(x')              the next part's input, or nothing

A norm is RMS (Zhang and Sennrich 2019) or layer norm (Ba et al. 2016) in fp32. As transformers does it, RMS values are rounded to the
dtype of x before the weight, but where the weight counts as `offset + weight`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.triton_kernels.kernel_arguments import NormWeights
from ds_ops.triton_kernels.triton_support import launch, next_power

__all__ = ["residual_norm"]


def residual_norm(
    x: Tensor, delta: Tensor | None, post: NormWeights | None, pre: NormWeights | None
) -> tuple[Tensor, Tensor | None]:
    """Compute (x + post(delta), pre of that); both valid on the current stream.

    Args:
        x: [T, n], bf16, fp16 or fp32, contiguous; n at most 16,384. delta: the same, or None for no sum.
        post: Norm of delta; None: delta as it is. pre: Norm of the sum; None: it is not wanted.
    Returns: The sum, which is x itself without a delta, and its norm or None.
    Cost: one launch; reads x and delta once, writes the sum and the norm once.
    """
    rows, n = x.shape
    total = x if delta is None else torch.empty_like(x)
    y = None if pre is None else torch.empty_like(x)
    if not rows or (delta is None and y is None):
        return total, y
    block = next_power(n)
    none = NormWeights(x, None, 0.0)
    first, second = post or none, pre or none
    launch(
        _residual_norm,
        (rows,),
        x, x if delta is None else delta, total, x if y is None else y,
        first.weight, first.weight if first.bias is None else first.bias,
        second.weight, second.weight if second.bias is None else second.bias,
        n, first.eps, second.eps, first.offset, second.offset,
        BLOCK=block, ADD=delta is not None,
        POST=_kind(post), POST_BIAS=first.bias is not None, PRE=_kind(pre), PRE_BIAS=second.bias is not None,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return total, y


def _kind(norm: NormWeights | None) -> int:
    return 0 if norm is None else 3 if norm.layer else 2 if norm.offset else 1


@triton.jit
def _residual_norm(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    x_ptr, delta_ptr, total_ptr, y_ptr,
    post_ptr, post_bias_ptr, pre_ptr, pre_bias_ptr,
    n, post_eps, pre_eps, post_offset, pre_offset,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
    POST: tl.constexpr, POST_BIAS: tl.constexpr, PRE: tl.constexpr, PRE_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one row. Kinds of norms: 0 none, 1 RMS rounded before the weight, 2 RMS with an offset, 3 layer norm."""
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, BLOCK)
    there = at < n
    x = tl.load(x_ptr + row + at, mask=there, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        d = tl.load(delta_ptr + row + at, mask=there, other=0.0).to(tl.float32)
        if POST == 3:
            mean = tl.sum(d, 0) / n
            d = tl.where(there, d - mean, 0.0)
        if POST > 0:
            d = d * (1.0 / tl.sqrt(tl.sum(d * d, 0) / n + post_eps))
            weight = tl.load(post_ptr + at, mask=there, other=0.0).to(tl.float32)
            if POST == 1:
                d = d.to(dtype).to(tl.float32)
            else:
                weight = weight + post_offset
            d = d * weight
            if POST_BIAS:
                d = d + tl.load(post_bias_ptr + at, mask=there, other=0.0).to(tl.float32)
            d = d.to(dtype).to(tl.float32)
        total = (x + d).to(dtype)
        tl.store(total_ptr + row + at, total, mask=there)
        x = total.to(tl.float32)
    if PRE == 3:
        middle = tl.sum(x, 0) / n
        x = tl.where(there, x - middle, 0.0)
    if PRE > 0:
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / n + pre_eps))
        weight2 = tl.load(pre_ptr + at, mask=there, other=0.0).to(tl.float32)
        if PRE == 1:
            x = x.to(dtype).to(tl.float32)
        else:
            weight2 = weight2 + pre_offset
        x = x * weight2
        if PRE_BIAS:
            x = x + tl.load(pre_bias_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + at, x.to(dtype), mask=there)
