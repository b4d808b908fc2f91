"""A linear layer in tiles, so that only one tile at a time has to be gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError

__all__ = ["TiledLinear"]


class TiledLinear(nn.Module):
    """`nn.Linear` as a grid of smaller ones: the same function, and units of a tile's size at stage 3.

    Args:
        in_features, out_features, bias: As `nn.Linear`.
        in_splits, out_splits: Tiles along each; sizes differ by at most one.
        layer: Makes a tile of (inputs, outputs, bias); its call gives the product, or the product and a bias that is not added yet.
        split_input: The input comes as a sequence of `in_splits` tensors.
        join_output: Outputs are joined along their last dimension; otherwise a list, one for each of `out_splits`.
    Input [..., in_features], output [..., out_features]; with a bias that is not added yet: the output, and that bias or None. Sums
    over input tiles are made in order, so results may differ from one matrix product in the last bits.

    Attributes:
        in_parts, out_parts: Where tiles begin, and the end.
        linears: The tiles: `linears[row][column]`, rows along the outputs. The last of a row has the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        layer: Callable[..., nn.Module] = nn.Linear,
        split_input: bool = False,
        join_output: bool = True,
    ) -> None:
        super().__init__()
        if not (1 <= in_splits <= in_features and 1 <= out_splits <= out_features):
            raise PlanError(
                f"{out_features} x {in_features} features cannot be split {out_splits} x {in_splits} times",
                code="tiled-splits",
                fix="Split no dimension into more tiles than it has features.",
            )
        self.in_sizes, self.out_sizes = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        self.in_parts, self.out_parts = [0, *accumulate(self.in_sizes)], [0, *accumulate(self.out_sizes)]
        self.split_input, self.join_output = split_input, join_output
        self.linears = nn.ModuleList(
            nn.ModuleList(layer(i, o, bias=bias and column == in_splits - 1) for column, i in enumerate(self.in_sizes))
            for o in self.out_sizes
        )

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        parts = list(x) if self.split_input else cast(Tensor, x).split(self.in_sizes, dim=-1)
        if len(parts) != len(self.in_sizes):
            raise PlanError(
                f"the input comes in {len(parts)} parts, the layer has {len(self.in_sizes)} columns of tiles",
                code="tiled-splits",
                fix="Give as many tensors as in_splits.",
            )
        rows, biases, pairs = [], [], False
        for tiles in self._rows():
            found = [tile(part) for tile, part in zip(tiles, parts, strict=True)]
            pairs = isinstance(found[0], tuple)
            if pairs:
                biases.append(found[-1][1])
                found = [product for product, _ in found]
            rows.append(sum(found[1:], start=found[0]))
        whole = torch.cat(rows, dim=-1) if self.join_output else rows
        if not pairs:
            return whole
        held = all(bias is not None for bias in biases)
        if self.join_output:
            return whole, torch.cat(biases, dim=-1) if held else None
        return whole, biases if held else None

    def _rows(self) -> Iterator[list[nn.Linear]]:
        for row in self.linears:
            yield [cast(nn.Linear, tile) for tile in cast(nn.ModuleList, row)]

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a whole layer of the same size."""
        for tiles, weight in zip(self._rows(), other.weight.split(self.out_sizes, dim=0), strict=True):
            for tile, part in zip(tiles, weight.split(self.in_sizes, dim=1), strict=True):
                tile.weight.copy_(part)
        if other.bias is not None:
            for tiles, bias in zip(self._rows(), other.bias.split(self.out_sizes), strict=True):
                tiles[-1].bias.copy_(bias)


def _sizes(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]
