"""Rotation of queries and keys by their positions: tables once, one turn a call."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_inference.spec import Rope

__all__ = ["Rotation"]


class Rotation:
    """One kind of rotation, for all layers that have it."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        kind = rope.parameters.get("rope_type", "default")
        if kind not in ("default", None):
            raise UnsupportedError(f"rope {kind}", code="inference-rope", fix="")
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
        self._frequencies = 1.0 / rope.theta**exponents
        self._rope = rope

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, 1, dim / 2] of positions [T]; the same for all layers of a step."""
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]

    def turn(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, heads, width], turned."""
        cos, sin = tables
        turned, rest = x[..., : self._rope.dim], x[..., self._rope.dim :]
        if self._rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, dim=-1)
        # The order of features within a head is the same for queries and keys, so it does not matter which it is.
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
