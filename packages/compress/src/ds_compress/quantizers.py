"""Fake quantisation: a tensor of the same shape whose values are those that few bits can say. Backward passes gradients through.

Words: a *group* is a run of elements, in memory order, that shares a scale; *noise* is a tensor in [-1/2, 1/2), added before
rounding, which makes rounding stochastic. Straight-through gradients: Bengio et al., arXiv:1308.3432; ternary weights: Li et al.,
arXiv:1605.04711; binary ones: Rastegari et al., arXiv:1603.05279.

A group of zeros stays zeros, and a constant group in asymmetric quantisation stays as it is: neither divides by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ds_config.errors import PlanError

__all__ = [
    "QuantGrid",
    "Symmetry",
    "asymmetric",
    "binary",
    "grid_of",
    "quantize",
    "straight_through",
    "symmetric",
    "ternary",
]

Symmetry = Literal["symmetric", "asymmetric"]
_PASS = 16  # so many bits leave values as they are


def symmetric(x: Tensor, bits: int, groups: int, noise: Tensor | None = None) -> Tensor:
    """round(x / s) * s with s = 2 max|x| / 2^bits, clamped to [-2^(bits-1), 2^(bits-1) - 1] steps."""
    rows = _rows(x, groups)
    scale = _nonzero(rows.abs().amax(1, keepdim=True) * 2 / 2**bits)
    steps = _round(rows / scale, noise).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (steps * scale).view(x.shape).to(x.dtype)


def asymmetric(x: Tensor, bits: int, groups: int, noise: Tensor | None = None) -> Tensor:
    """Quantize as `symmetric` does, but between the least and the largest value of each group.

    s = (max - min) / 2^bits, and the zero point is a multiple of s.
    """
    rows = _rows(x, groups)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = _nonzero((high - low) / 2**bits)
    zero = (low / scale).round() * scale
    steps = _round((rows - zero) / scale, noise).clamp(0, 2**bits - 1)
    return torch.where(high == low, rows, steps * scale + zero).view(x.shape).to(x.dtype)


def ternary(x: Tensor, groups: int) -> Tensor:
    """Quantize to -a, 0 or a: values below 0.7 times the mean of |x| become 0, a is the mean of |x| over the rest."""
    rows = _rows(x, groups)
    size = rows.abs()
    large = size > 0.7 * size.mean(1, keepdim=True)
    alpha = (size * large).sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1)
    return (rows.sign() * large * alpha).view(x.shape).to(x.dtype)


def binary(x: Tensor, groups: int) -> Tensor:
    """Quantize to sign(x) times the mean of |x| of each group."""
    rows = _rows(x, groups)
    return (rows.sign() * rows.abs().mean(1, keepdim=True)).view(x.shape).to(x.dtype)


@dataclass(frozen=True, slots=True)
class QuantGrid:
    """How values are quantised.

    Attributes:
        bits: 16 leaves them as they are, 2 is ternary, 1 is binary.
        groups: Runs of elements with a scale of their own.
        symmetry: Symmetric for 1 and 2 bits.
    """

    bits: int
    groups: int = 1
    symmetry: Symmetry = "symmetric"


def grid_of(numel: int, grid: QuantGrid, name: str) -> QuantGrid:
    """Return `grid` after checking that `numel` elements can be quantized with this grid.

    Raises:
        PlanError: the groups do not divide the elements ("compress-groups"); 1 or 2 bits asymmetric ("compress-bits").
    """
    if numel % grid.groups:
        raise PlanError(
            f"{name} has {numel} elements, quantize_groups is {grid.groups}",
            code="compress-groups",
            fix="Use a number of groups that divides every weight, or leave the layer out by its name.",
        )
    if grid.bits <= 2 and grid.symmetry == "asymmetric":
        raise PlanError(
            f"{name}: {grid.bits} bits are symmetric only",
            code="compress-bits",
            fix="Use symmetric, or 3 bits and more.",
        )
    return grid


def quantize(x: Tensor, grid: QuantGrid, noise: Tensor | None = None) -> Tensor:
    """Round `x` to the grid, without gradient. Computed in fp32 for half-precision values.

    Args:
        x: Any shape; `grid.groups` divides its elements.
        noise: Of the shape of `x`, for stochastic rounding; not used with 1 and 2 bits.
    """
    if grid.bits >= _PASS or not x.numel():
        return x
    if grid.bits == 1:
        return binary(x, grid.groups)
    if grid.bits == 2:
        return ternary(x, grid.groups)
    chosen = symmetric if grid.symmetry == "symmetric" else asymmetric
    return chosen(x, grid.bits, grid.groups, noise)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Return `value` in forward, and pass the gradient to `x` in backward (straight-through estimator)."""
    result: Tensor = _StraightThrough.apply(x, value.detach())
    return result


def _rows(x: Tensor, groups: int) -> Tensor:
    return x.detach().reshape(groups, -1).to(torch.promote_types(x.dtype, torch.float32))


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _round(steps: Tensor, noise: Tensor | None) -> Tensor:
    return steps.round() if noise is None else (steps + noise.view(steps.shape)).round()
