"""Fake quantization: numbers as they would come back from their codes, with a gradient for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_ops.formats import Draw, QuantSpec
from ds_ops.quant import dequantize, quantize

__all__ = ["fake_quantize"]


def fake_quantize(x: Tensor, spec: QuantSpec, *, rows: int = 1, draw: Draw | None = None) -> Tensor:
    """dequantize(quantize(x)), with the straight-through gradient: dL/dx = dL/dy (Bengio et al. 2013).

    Ranges are taken from x itself, so no element is clipped and none loses its gradient.

    Args:
        x: contiguous fp32, bf16 or fp16 of any shape. rows, draw: as in `quantize`.
    Returns: like x.
    Cost: two passes over x and its codes; nothing is kept for the backward.
    """
    out: Tensor = _FakeQuantize.apply(x, spec, rows, draw or Draw())
    return out


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, rows: int, draw: Draw) -> Tensor:
        return dequantize(quantize(x, spec, rows=rows, draw=draw))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None
