"""Pieces of attention that torch has no single call for: softmax with masks, and attention with a pair bias."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

import ds_ops._call as _call
from ds_ops.registry import Op, absent_backend, choose, reference_backend, register, torch_backend

__all__ = ["evoformer_attention", "masked_softmax"]


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """Compute softmax(scale * scores + mask) over the last dim, fp32 inside, in the dtype of scores.

    Args:
        scores: [..., queries, keys] floats.
        mask: broadcastable to scores: booleans (True: visible) or floats to add (ALiBi, -inf). None: none.
        causal: query i attends to keys up to i + keys - queries only, so that the last query attends to all.
    Returns: like scores; a row with no visible key is zeros, not NaN.

    Raises:
        KernelError: "kernel-argument" if scores has less than two dims.
    Cost: about five passes; use torch's scaled_dot_product_attention where the probabilities themselves are not needed.
    """
    if scores.dim() < 2 or not scores.is_floating_point():
        raise _call.refuse(f"scores: expected floats [..., queries, keys]; found {_call.describe(scores)}.")
    if mask is not None:
        _require_mask(scores, mask)
    out: Tensor = choose(_SOFTMAX, scores.device.type, scores.dtype).backend.run(scores, mask, scale, causal)
    return out


def evoformer_attention(
    q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None = None, pair_bias: Tensor | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + mask_bias + pair_bias) v, for alignments (Jumper et al. 2021).

    Args:
        q, k, v: floats [batch, rows, length, heads, d], all of one dtype.
        mask_bias: floats [batch, rows, 1, 1, length], or None.
        pair_bias: [batch, 1, heads, length, length], or None.
    Returns: like q. Gradients reach both biases.

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: rows are processed in sequence, so biases and scores of one row exist at a time: [batch, heads, length,
    length].
    """
    _require_evoformer(q, k, v, mask_bias, pair_bias)
    out: Tensor = choose(_EVOFORMER, q.device.type, q.dtype).backend.run(q, k, v, mask_bias, pair_bias)
    return out


def _require_mask(scores: Tensor, mask: Tensor) -> None:
    fits = len(mask.shape) <= scores.dim() and all(
        m in (1, s) for m, s in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    )
    if not fits or mask.device != scores.device or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise _call.refuse(
            f"mask: expected booleans or floats that broadcast to {_call.describe(scores)}; found {_call.describe(mask)}."
        )


def _require_evoformer(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> None:
    same = all((t.shape, t.dtype, t.device) == (q.shape, q.dtype, q.device) for t in (k, v))
    if q.dim() != 5 or not q.is_floating_point() or not same:
        shown = "; ".join(map(_call.describe, (q, k, v)))
        raise _call.refuse(f"q, k, v: expected floats of one shape of five dims; found {shown}.")
    batch, rows, length, heads, _ = q.shape
    wanted = {"mask_bias": [batch, rows, 1, 1, length], "pair_bias": [batch, 1, heads, length, length]}
    for name, t in (("mask_bias", mask_bias), ("pair_bias", pair_bias)):
        if t is not None and (list(t.shape) != wanted[name] or t.device != q.device or not t.is_floating_point()):
            raise _call.refuse(f"{name}: expected floats {wanted[name]} on {q.device}; found {_call.describe(t)}.")


def _reference_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is not None:
        wide = wide.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else wide + mask
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        wide = wide.masked_fill(hidden, -torch.inf)
    blind = (
        wide.detach().amax(-1, keepdim=True) == -torch.inf
        if scores.shape[-1]
        else wide.detach().sum(-1, keepdim=True) > 0
    )
    # Filled before the softmax, so that its gradient is not NaN either.
    return torch.softmax(wide.masked_fill(blind, 0), -1).masked_fill(blind, 0).to(scores.dtype)


def _torch_evoformer(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    outs = []
    for row in range(q.shape[1]):
        bias: Tensor | None = None if pair_bias is None else pair_bias[:, 0].to(q.dtype)
        if mask_bias is not None:
            row_bias = mask_bias[:, row].to(q.dtype)
            bias = row_bias if bias is None else bias + row_bias
        a, b, c = (t[:, row].transpose(1, 2) for t in (q, k, v))
        outs.append(functional.scaled_dot_product_attention(a, b, c, attn_mask=bias).transpose(1, 2))
    return torch.stack(outs, dim=1) if outs else torch.empty_like(q)


def _reference_evoformer(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    a, b, c = (t.transpose(2, 3).to(wide) for t in (q, k, v))
    scores = a @ b.transpose(-1, -2) * q.shape[-1] ** -0.5
    for bias in (mask_bias, pair_bias):
        scores = scores if bias is None else scores + bias.to(wide)
    return (torch.softmax(scores, -1) @ c).transpose(2, 3).to(q.dtype)


_SOFTMAX = register(
    Op(
        "masked_softmax",
        "softmax of masked scores",
        (
            absent_backend(
                "cpu", "not written: torch's fused attention is the fast path where probabilities are not needed"
            ),
            reference_backend(_reference_softmax),
        ),
    )
)
_EVOFORMER = register(
    Op(
        "evoformer_attention",
        "attention with a mask bias and a pair bias",
        (torch_backend(_torch_evoformer), reference_backend(_reference_evoformer)),
    )
)
