"""Experts as copies of any module."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ds_moe.dispatch import DispatchRows

__all__ = ["Experts", "each"]


class Experts(nn.Module):
    """Copies of a module, each for its own rows.

    Every copy is called in every forward, also without rows: a parameter that is gathered when its module is called is then gathered
    by all ranks that hold it, whatever was routed where.

    Args:
        expert: Maps [rows, n] to [rows, m], also with 0 rows; of a tuple the first counts. All copies begin with its values.
        num_local_experts: Copies on this rank.
        expert_group_name: What `param.group_name` becomes; `param.allreduce` becomes False. Optimizers group by them.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Compute y[r] = expert of row r (x[r]); zeros for rows of no expert."""
        return each(self.deepspeed_experts, x, rows)


def each(experts: Iterable[nn.Module], x: Tensor, rows: DispatchRows) -> Tensor:
    """Compute y[r] = expert of row r (x[r]) for modules; zeros for rows of no expert."""
    bounds = rows.on_host()
    sizes = [end - start for start, end in zip((0, *bounds), bounds, strict=False)]
    # split, because the gradient of each x[a:b] would be as large as x.
    *parts, rest = x.split([*sizes, x.shape[0] - (bounds[-1] if bounds else 0)])
    outputs = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    outs = [out[0] if isinstance(out, tuple) else out for out in outputs]
    if rest.shape[0]:
        outs.append(outs[0].new_zeros(rest.shape[0], *outs[0].shape[1:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
