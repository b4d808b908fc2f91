"""Rotation of queries and keys by their positions: frequencies once, tables once a step, one rotation a call.

Where a scaling depends on the length in use (longrope has factors for short and for long contexts), it is chosen once, by the longest
sequence that is served: keys in the cache and queries that come later must be rotated alike, whichever request they belong to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_inference.spec import RopeSpec
from ds_ops.rotary_scaling import RotarySpec as Scaled
from ds_ops.rotary_scaling import rotary_frequencies

__all__ = ["Rotation"]


class Rotation:
    """One kind of rotation, for all layers that have it.

    Args:
        length: Of the longest sequence that is served.
    Raises:
        UnsupportedError: a kind of scaling that is not known ("rotary-scaling").
    """

    def __init__(self, rope: RopeSpec, length: int, device: torch.device) -> None:
        scaling = {k: v for k, v in rope.parameters.items() if k != "max_position_embeddings"}
        longest = int(rope.parameters.get("max_position_embeddings", 0) or 0)
        frequencies = rotary_frequencies(Scaled(rope.dim, rope.theta, scaling, longest), min(length, longest))
        self._angles, self._magnitude = frequencies.angles.float().to(device), frequencies.magnitude
        self.rope = rope

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute (cos, sin) [T, 1, dim / 2] of positions [T]; the same for all layers of a step."""
        angles = positions.float()[:, None] * self._angles
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def turn(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the rotary embedding to x [T, heads, width]."""
        cos, sin = tables
        turned, rest = x[..., : self.rope.dim], x[..., self.rope.dim :]
        if self.rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, dim=-1)
        # The order of features within a head is the same for queries and keys, so it does not matter which it is.
        parts = [a * cos - b * sin, b * cos + a * sin]
        return torch.cat([*parts, rest] if rest.shape[-1] else parts, -1)
