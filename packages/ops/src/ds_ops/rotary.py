"""Rotary position embedding (Su et al. 2021): pairs of features are turned by an angle that grows with the position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.registry import Op, absent_backend, choose, reference_backend, register
from ds_ops.rotary_scaling import RotarySpec, rotary_frequencies

__all__ = ["rotary_tables", "rotate", "scaled_tables"]


def rotary_tables(positions: Tensor, dim: int, *, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Compute (cos, sin) of position * base^(-2i / dim), each fp32 [*positions.shape, dim / 2], in fp64.

    positions: integers of any shape. dim: even, the number of rotated features.
    """
    if dim < 2 or dim % 2:
        raise KernelError(f"dim {dim} is not a positive even number.", code="kernel-argument", fix="Turn whole pairs.")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    angles = positions.double()[..., None] / base**exponents
    return angles.cos().float(), angles.sin().float()


def scaled_tables(positions: Tensor, rope: RotarySpec, *, length: int = 0) -> tuple[Tensor, Tensor]:
    """Compute `rotary_tables` of a rotary embedding with linear, dynamic, YaRN, longrope or llama3 scaling.

    length: positions in use, which "dynamic" and "longrope" depend on (not read from `positions`, which may be on a
    device).
    """
    frequencies = rotary_frequencies(rope, length)
    angles = positions.double()[..., None] * frequencies.angles.to(positions.device)
    return tuple((t * frequencies.magnitude).float() for t in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate (a, b) -> (a cos - b sin, b cos + a sin), the first 2 * cos.shape[-1] features of x (Su et al. 2021).

    Other features are unchanged.

    Args:
        x: [..., tokens, heads, features] floats.
        cos, sin: fp32 [..., tokens, pairs], of `rotary_tables`; broadcast over heads and missing leading dims.
        interleaved: pairs are features (2i, 2i + 1); else (i, i + pairs), as Hugging Face models have them.
    Returns: like x, computed in fp32.

    Raises:
        KernelError: "kernel-argument" if tables and x do not fit.
    Cost: about five passes over x; the backward is the opposite rotation and saves nothing but the tables.
    """
    pairs = cos.shape[-1] if cos.dim() else 0
    fits = cos.shape == sin.shape and x.dim() >= 3 and cos.dim() >= 2 and 2 * pairs <= x.shape[-1]
    floats = all(t.is_floating_point() and t.device == x.device for t in (x, cos, sin))
    if not fits or not floats or cos.shape[-2] != x.shape[-3]:
        raise KernelError(
            f"tables {_call.describe(cos)} and {_call.describe(sin)} do not fit x [..., tokens, heads, features]:"
            f" {_call.describe(x)}.",
            code="kernel-argument",
            fix="Make tables of [tokens, pairs] with rotary_tables(positions, dim), dim at most the features of a head.",
        )
    out: Tensor = choose(_ROTATE, x.device.type, x.dtype).backend.run(x, cos, sin, interleaved)
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    c, s = cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(pairs, dim=-1)
    halves = (a * c - b * s, b * c + a * s)
    mixed = torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)
    return torch.cat((mixed.to(x.dtype), rest), dim=-1)


def _reference_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if torch.compiler.is_compiling():
        return _turn(x, cos, sin, interleaved)
    out: Tensor = _Rotate.apply(x, cos, sin, interleaved)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin, ctx.interleaved), None, None, None


_ROTATE = register(
    Op(
        "rotate",
        "rotary position embedding",
        (
            absent_backend("cpu", "not written: composed torch takes about five passes; torch.compile fuses it"),
            reference_backend(_reference_rotate),
        ),
    )
)
