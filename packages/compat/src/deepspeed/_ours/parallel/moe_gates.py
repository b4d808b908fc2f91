"""Tokens on their way: into and out of experts' slots, and over tensor-parallel ranks. `deepspeed.moe.sharded_moe`, `.mappings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed._ours.communication import group_getters
from ds_comm.differentiable import all_gather, split


def route_slots(
    indices: Sequence[Tensor], locations: Sequence[Tensor], num_experts: int, capacity: int
) -> list[Tensor]:
    """Compute for every choice the slot of each token, [tokens]: expert times capacity plus position; -1 if dropped.

    Args:
        indices: For every choice, the expert of each token; negative where there is none.
        locations: For every choice, the token's position among the expert's tokens.
    """
    slots = []
    for expert, place in zip(indices, locations, strict=True):
        valid = (expert >= 0) & (expert < num_experts) & (place >= 0) & (place < capacity)
        slots.append(torch.where(valid, expert.long() * capacity + place.long(), -1))
    return slots


def sparse_encode(hidden: Tensor, slots: Sequence[Tensor], num_experts: int, capacity: int) -> Tensor:
    """Scatter every token into its slots, [experts, capacity, hidden], with zeros elsewhere."""
    out = hidden.new_zeros(num_experts * capacity + 1, hidden.shape[-1])  # the last row takes what was dropped
    for slot in slots:
        out = out.index_add(0, slot.where(slot >= 0, num_experts * capacity), hidden)
    return out[:-1].view(num_experts, capacity, hidden.shape[-1])


def sparse_decode(expert_output: Tensor, slots: Sequence[Tensor], gates: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Combine the slots of each token, weighted by its gates, into [tokens, hidden].

    Args:
        expert_output: [experts * capacity, hidden].
        gates: For every choice, [tokens].
    """
    out = expert_output.new_zeros(num_tokens, expert_output.shape[-1])
    for slot, gate in zip(slots, gates, strict=True):
        rows = expert_output[slot.clamp_min(0)] * (slot >= 0).unsqueeze(-1)
        out = out + gate.to(rows.dtype).unsqueeze(-1) * rows
    return out


@dataclass(frozen=True)
class FusedExpertLayout:
    """How packed weights of gate and up lie: "gate_up_first" [E, 2F, n], or "hidden_first" [E, n, 2F], which `needs_transpose`."""

    layout: str
    hidden_size: int
    ffn_hidden_size: int
    needs_transpose: bool


def classify_fused_gate_up_layout(w1_shape: Sequence[int], w2_shape: Sequence[int]) -> FusedExpertLayout | None:
    """Tell the layout of packed experts by the shapes of gate and up, and of down; None where they do not fit each other."""
    if (len(w1_shape), len(w2_shape)) != (3, 3):
        return None
    first, second = w1_shape[1:]
    down = tuple(w2_shape[1:])
    if down == (second, first / 2):
        return FusedExpertLayout("gate_up_first", second, first // 2, needs_transpose=False)
    if down == (second / 2, first):
        return FusedExpertLayout("hidden_first", first, second // 2, needs_transpose=True)
    return None


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this tensor-parallel rank's shard along `dim` of replicated tokens."""
    if group_getters.get_model_parallel_world_size() == 1:
        return input_
    return split(input_, group_getters.get_model_parallel_group(), dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Gather the tokens of every tensor-parallel rank along `dim` (all-gather)."""
    if group_getters.get_model_parallel_world_size() == 1:
        return input_
    gathered: Tensor = all_gather(input_, group_getters.get_model_parallel_group(), dim)
    return gathered
