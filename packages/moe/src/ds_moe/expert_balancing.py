"""Balancing without a loss: biases of routers follow the load of their experts (Wang et al. 2024, algorithm 1)."""

from __future__ import annotations

import torch
from torch import nn

from ds_comm import GroupLike, all_reduce, as_group, world_group
from ds_moe.balancing_losses import update_expert_bias
from ds_moe.moe_layer import TopKGate

__all__ = ["balance_experts"]


def balance_experts(model: nn.Module, group: GroupLike = None) -> None:
    """Move the biases of all routers by their `bias_rate`, towards experts with few tokens since the last call. Once a step, on all ranks.

    Args:
        group: Ranks whose loads are summed: those that the batch is split over. None: all ranks; with pipeline stages give the data group.
    Collective over the group: one sum of an integer an expert.
    """
    gates = [module for module in model.modules() if isinstance(module, TopKGate) and module.expert_bias is not None]
    if not gates:
        return
    counts = torch.cat([gate.take_counts() for gate in gates])
    ranks = world_group() if group is None else as_group(group)
    if ranks.size > 1:
        all_reduce(counts, group=ranks, unit="moe balance")
    for gate, load in zip(gates, counts.split([g.wg.weight.shape[0] for g in gates]), strict=True):
        if gate.expert_bias is not None:
            update_expert_bias(gate.expert_bias, load, gate.rule.bias_rate)
