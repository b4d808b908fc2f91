"""A linear layer whose base is frozen, cut over ranks and quantized if wanted, with a low-rank update beside it (Hu et al. 2021).

The base never changes, so nobody keeps more of it than a rank's own rows; they are gathered for a product, and again for its
gradient. Quantized rows stand alone, so codes travel and numbers are made of them where they are multiplied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ds_comm as comm
from ds_comm import Assignment, Box, Family, Group, assign
from ds_config.errors import PlanError
from ds_ops.formats import Format, QuantSpec, QuantTensor
from ds_ops.quant import dequantize, quantize
from ds_ops.quant_linear import quantized_linear

__all__ = ["LoRALinear"]


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
    """

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
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features // ranks, in_features, **made), requires_grad=False)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self._made = made
        self._place()

    @property
    def started(self) -> bool:
        """Whether there is an update."""
        return hasattr(self, "lora_A")

    def _place(self) -> None:
        """Tell who shards and saves the model which rows of W, or of its codes, are here."""
        if self.group is None or self.group.size == 1:
            return
        alone = Group("lora", (self.group.global_rank,), 0)
        rows, columns = self.weight.shape
        box = Box((self.group.rank * rows, 0), (rows, columns))
        family = Family(f"lora{self.group.rank}", alone, 1)
        assign(self.weight, Assignment(family, None, (self.out_features, columns), box))

    def start(self) -> None:
        """Freeze and quantize the base as it is now, and begin the update. Again begins the update anew."""
        self.weight.requires_grad_(False)
        self.lora_A = nn.Linear(self.in_features, self.rank, bias=False, **self._made)
        self.lora_B = nn.Linear(self.rank, self.out_features, bias=False, **self._made)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        if self.quantized is not None and "weight" in self._parameters:
            spec = QuantSpec(self.quantized, min(self.group_size, self.in_features))
            codes = quantize(self.weight.detach().contiguous(), spec, rows=self.weight.shape[0])
            self._spec, self._dtype = spec, self.weight.dtype
            del self.weight
            self.register_buffer("weight", codes.wire)
            self._place()

    def base(self) -> Tensor:
        """W [out, in], whole, in the dtype it had. Collective over the group."""
        rows = self._rows()
        return dequantize(rows) if isinstance(rows, QuantTensor) else rows

    def _rows(self) -> Tensor | QuantTensor:
        held = self.weight.detach()
        if self.group is not None and self.group.size > 1:
            whole = held.new_empty(held.shape[0] * self.group.size, held.shape[1])
            comm.all_gather_single(whole, held.contiguous(), self.group, unit="lora").wait()
            held = whole
        if "weight" in self._parameters:
            return held
        shape = (self.out_features, self.in_features)
        return QuantTensor(held, self._spec, self.in_features, shape, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            raise PlanError(
                "a LoRALinear was used before its update began",
                code="zero-lora",
                fix="Call start() when the base has its values.",
            )
        return _Product.apply(x, self) + self.scale * self.lora_B(self.lora_A(x))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A whole base gives this rank its rows; a cut one is its own already.
        found = state_dict.get(f"{prefix}weight")
        if isinstance(found, Tensor) and self.group is not None and found.shape[0] == self.out_features:
            rows = self.out_features // self.group.size
            first = self.group.rank * rows
            state_dict = {**state_dict, f"{prefix}weight": found[first : first + rows]}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Sizes, as `print(model)` shows them."""
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
