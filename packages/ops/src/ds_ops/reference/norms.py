"""Layer norm and RMS norm in plain torch. Arithmetic is fp32 (fp64 for fp64); the result is rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute y = x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019)."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(h.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim, var biased (Ba et al. 2016)."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(h.dtype)
    return (y if bias is None else y + bias.to(h.dtype)).to(x.dtype)
