"""Linear layers made to be sharded: one in tiles, one with a frozen base and a low-rank update (LoRA).

`TiledLinear` is a grid of smaller layers, so that only one tile at a time has to be gathered.

The base of `LoRALinear` never changes, so a rank keeps its own rows only; they are gathered for a product, and again for its gradient.
Quantized rows stand alone, so codes travel and numbers are made of them where they are multiplied. Reference: Hu et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ds_comm as comm
from ds_comm import Box, Group, ParamSharding, ReductionGroup, set_param_sharding
from ds_config.errors import PlanError
from ds_ops.formats import Format, QuantSpec, QuantTensor
from ds_ops.quant import dequantize, quantize
from ds_ops.quant_linear import quantized_linear

__all__ = ["LoRALinear", "TiledLinear"]


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
            products = [tile(part) for tile, part in zip(tiles, parts, strict=True)]
            pairs = isinstance(products[0], tuple)
            if pairs:
                biases.append(products[-1][1])
                products = [product for product, _ in products]
            rows.append(sum(products[1:], start=products[0]))
        whole = torch.cat(rows, dim=-1) if self.join_output else rows
        if not pairs:
            return whole
        has_bias = all(bias is not None for bias in biases)
        if self.join_output:
            return whole, torch.cat(biases, dim=-1) if has_bias else None
        return whole, biases if has_bias else None

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


class LoRALinear(nn.Module):
    """y = x W^T + scale * x A^T B^T: W [out, in] frozen, A [rank, in] drawn, B [out, rank] zeros at first.

    Args:
        rank, alpha: Of the update; it is scaled by alpha / rank.
        group: Ranks that W is cut over, row by row; None: every rank has all of it.
        quantized: Format of W's codes after `start`, in groups of `group_size` elements of a row; None keeps numbers.
        dtype, device: Of W, A and B.
    Input [..., in], output [..., out].
    Raises:
        PlanError: a rank below 1, or rows that the group's ranks cannot have alike ("zero-lora").
    Cost: with a group, a gather of W (of its codes) a forward, and one more where x needs a gradient.

    Attributes:
        update: Names of the layers A and B, as they are in checkpoints.
    """

    update: ClassVar[tuple[str, str]] = ("lora_A", "lora_B")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        group: Group | None = None,
        quantized: Format | None = None,
        group_size: int = 512,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        ranks = 1 if group is None else group.size
        if rank < 1 or out_features % ranks:
            raise PlanError(
                f"a base of {out_features} rows over {ranks} ranks, with an update of rank {rank}",
                code="zero-lora",
                fix="Use a rank of at least 1, and cut over a number of ranks that divides the rows.",
            )
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.scale, self.group, self.quantized, self.group_size = alpha / rank, group, quantized, group_size
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features // ranks, in_features, **factory), requires_grad=False)
        self.draw_base()
        self._factory = factory
        self._place()

    @property
    def started(self) -> bool:
        """Whether there is an update."""
        return hasattr(self, self.update[0])

    def draw_base(self) -> None:
        """Give W its first values, as `nn.Linear` does. Called once, at construction."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def _place(self) -> None:
        """Tell who shards and saves the model which rows of W, or of its codes, are here."""
        if self.group is None or self.group.size == 1:
            return
        alone = Group("lora", (self.group.global_rank,), 0)
        rows, columns = self.weight.shape
        box = Box((self.group.rank * rows, 0), (rows, columns))
        family = ReductionGroup(f"lora{self.group.rank}", alone, 1)
        set_param_sharding(self.weight, ParamSharding(family, None, (self.out_features, columns), box))

    def start(self) -> None:
        """Freeze and quantize the base as it is now, and begin the update. Again begins the update anew."""
        self.weight.requires_grad_(False)
        down = nn.Linear(self.in_features, self.rank, bias=False, **self._factory)
        up = nn.Linear(self.rank, self.out_features, bias=False, **self._factory)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        for name, layer in zip(self.update, (down, up), strict=True):
            setattr(self, name, layer)
        if self.quantized is not None and "weight" in self._parameters:
            spec = QuantSpec(self.quantized, min(self.group_size, self.in_features))
            codes = quantize(self.weight.detach().contiguous(), spec, rows=self.weight.shape[0])
            self._spec, self._dtype = spec, self.weight.dtype
            del self.weight
            self.register_buffer("weight", codes.wire)
            self._place()

    def base(self) -> Tensor:
        """Return the whole base W [out, in] in its original dtype. Collective over the group: all-gathers its rows."""
        rows = self._rows()
        return dequantize(rows) if isinstance(rows, QuantTensor) else rows

    def _rows(self) -> Tensor | QuantTensor:
        rows = self.weight.detach()
        if self.group is not None and self.group.size > 1:
            whole = rows.new_empty(rows.shape[0] * self.group.size, rows.shape[1])
            comm.all_gather_single(whole, rows.contiguous(), self.group, unit="lora").wait()
            rows = whole
        if "weight" in self._parameters:
            return rows
        shape = (self.out_features, self.in_features)
        return QuantTensor(rows, self._spec, self.in_features, shape, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            raise PlanError(
                "a LoRALinear was used before its update began",
                code="zero-lora",
                fix="Call start() when the base has its values.",
            )
        down, up = (getattr(self, name) for name in self.update)
        return _Product.apply(x, self) + self.scale * up(down(x))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A whole base gives this rank its rows; a cut one is its own already.
        base = state_dict.get(f"{prefix}weight")
        if isinstance(base, Tensor) and self.group is not None and base.shape[0] == self.out_features:
            rows = self.out_features // self.group.size
            first = self.group.rank * rows
            state_dict = {**state_dict, f"{prefix}weight": base[first : first + rows]}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Return the sizes that `print(model)` shows."""
        ranks = 1 if self.group is None else self.group.size
        codes = "" if self.quantized is None else f", {self.quantized.name}"
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, over {ranks} ranks{codes}"


class _Product(torch.autograd.Function):
    """x W^T without keeping W for the backward: it is gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LoRALinear) -> Tensor:
        ctx.layer = layer
        rows = layer._rows()
        return quantized_linear(x, rows) if isinstance(rows, QuantTensor) else F.linear(x, rows.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad @ ctx.layer.base().to(grad.dtype), None
