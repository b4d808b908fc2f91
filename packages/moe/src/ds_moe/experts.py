"""Experts as copies of any module."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ds_moe.dispatch import Rows

__all__ = ["Experts"]


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

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """y[r] = expert of row r (x[r]); zeros for rows that are nobody's."""
        outs, start = [], 0
        for expert, end in zip(self.deepspeed_experts, rows.on_host(), strict=True):
            out = expert(x[start:end])
            outs.append(out[0] if isinstance(out, tuple) else out)
            start = end
        if start < x.shape[0]:
            outs.append(outs[0].new_zeros(x.shape[0] - start, *outs[0].shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
