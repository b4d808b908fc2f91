"""A linear layer in tiles, so that only one tile at a time has to be gathered."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError

__all__ = ["TiledLinear"]


class TiledLinear(nn.Module):
    """`nn.Linear` as a grid of smaller ones: the same function, and units of a tile's size at stage 3.

    Args:
        in_features, out_features, bias: As `nn.Linear`.
        in_splits, out_splits: Tiles along each; sizes differ by at most one.
    Input [..., in_features], output [..., out_features]. Sums over input tiles are made in order, so results may differ from
    one matrix product in the last bits.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1
    ) -> None:
        super().__init__()
        if not (1 <= in_splits <= in_features and 1 <= out_splits <= out_features):
            raise PlanError(
                f"{out_features} x {in_features} features cannot be split {out_splits} x {in_splits} times",
                code="tiled-splits",
                fix="Split no dimension into more tiles than it has features.",
            )
        self.in_sizes, self.out_sizes = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        self.tiles = nn.ModuleList(
            nn.Linear(i, o, bias and column == 0) for o in self.out_sizes for column, i in enumerate(self.in_sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.in_sizes, dim=-1)
        rows = []
        for row in range(len(self.out_sizes)):
            products = [tile(part) for tile, part in zip(self._row(row), parts, strict=True)]
            total = products[0]
            for product in products[1:]:
                total = total + product
            rows.append(total)
        return torch.cat(rows, dim=-1)

    def _row(self, number: int) -> list[nn.Linear]:
        width = len(self.in_sizes)
        return [cast(nn.Linear, self.tiles[number * width + column]) for column in range(width)]

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a whole layer of the same size."""
        for number, weight in enumerate(other.weight.split(self.out_sizes, dim=0)):
            for tile, part in zip(self._row(number), weight.split(self.in_sizes, dim=1), strict=True):
                tile.weight.copy_(part)
        if other.bias is not None:
            for number, bias in enumerate(other.bias.split(self.out_sizes)):
                self._row(number)[0].bias.copy_(bias)


def _sizes(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]
