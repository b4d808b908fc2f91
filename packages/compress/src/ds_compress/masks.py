"""Masks: what of a weight is kept. A mask has ones and zeros, or False and True, and the same count of them for the same ratio.

Words: *dense ratio* is the share that is kept; ceil(ratio * n) of n are. *Scores* say what is: |w| summed over what is kept or
dropped together (l1, and 2:4 of each four), learnt numbers (topk, with straight-through gradients: Sanh et al., arXiv:2005.07683), or sensitivity of the
loss (SNIP: Lee et al., arXiv:1810.02340).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "block_scores",
    "channel_scores",
    "expand_blocks",
    "head_scores",
    "learnt_mask",
    "num_kept",
    "row_scores",
    "snip_update",
    "top_mask",
    "two_of_four",
]


def num_kept(numel: int, ratio: float) -> int:
    """Return how many of `numel` elements stay: ceil(ratio * numel), tolerant of float rounding."""
    return min(numel, max(1, math.ceil(ratio * numel - 1e-9 * numel)))


def top_mask(scores: Tensor, ratio: float) -> Tensor:
    """Mark the elements with the highest scores; bool, of the shape of `scores`.

    Of equal scores the first are marked.
    """
    flat = scores.detach().reshape(-1)
    order = flat.argsort(descending=True, stable=True)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[order[: num_kept(flat.numel(), ratio)]] = True
    return mask.view(scores.shape)


def two_of_four(weight: Tensor) -> Tensor:
    """Mark the two largest |w| of every four inputs that lie side by side: the pattern of sparse tensor cores (Mishra et al., arXiv:2104.08378).

    Inputs are the second dim, as [out, in] or [out, in, *kernel]; there are a multiple of 4 of them. Bool, of the shape of `weight`.
    """
    sizes = weight.detach().abs().movedim(1, -1)
    fours = sizes.reshape(-1, 4)
    kept = fours.argsort(dim=1, descending=True, stable=True)[:, :2]
    mask = torch.zeros_like(fours, dtype=torch.bool).scatter_(1, kept, True)
    return mask.view(sizes.shape).movedim(-1, 1).contiguous()


class _Learnt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, ratio: float) -> Tensor:
        return top_mask(scores, ratio).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def learnt_mask(scores: Tensor, ratio: float) -> Tensor:
    """Return `top_mask` in the dtype of `scores`, whose gradient is that of the mask."""
    result: Tensor = _Learnt.apply(scores, ratio)
    return result


def row_scores(weight: Tensor) -> Tensor:
    """Sum of |w| of each output row: [out, ...] -> [out]."""
    return weight.detach().abs().flatten(1).sum(1, dtype=torch.promote_types(weight.dtype, torch.float32))


channel_scores = row_scores
"""The output channels of a convolution are its rows."""


def head_scores(weight: Tensor, heads: int) -> Tensor:
    """Sum of |w| of the columns of each head in an output projection: [out, heads * size] -> [heads]."""
    out, columns = weight.shape
    parts = weight.detach().abs().reshape(out, heads, columns // heads)
    return parts.sum((0, 2), dtype=torch.promote_types(weight.dtype, torch.float32))


def block_scores(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Sums of `values` [rows, columns] over blocks; edges are blocks of what is left."""
    rows, columns = values.shape
    tall, wide = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    padded = values.new_zeros(tall * block[0], wide * block[1])
    padded[:rows, :columns] = values
    return padded.view(tall, block[0], wide, block[1]).sum((1, 3))


def expand_blocks(mask: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Expand a mask of blocks to a mask of elements."""
    full = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]


def snip_update(scores: Tensor, sensitivity: Tensor, momentum: float = 0.9) -> Tensor:
    """Compute momentum * scores + |s| / sum |s|, where s is the sum of w * dL/dw over a block.

    s covers all samples of the step, and is divided by its sum, so that loss scaling and the size of the loss do not
    matter. A term that is not finite is left out.
    """
    size = sensitivity.abs()
    total = size.sum()
    usable = torch.isfinite(total) & (total > 0)
    return momentum * scores + torch.where(usable, size / torch.where(usable, total, torch.ones_like(total)), 0.0)
