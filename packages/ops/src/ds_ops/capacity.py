"""Experts that take so many slots and no more: which slots stay, decided the same way on every run and every device.

Words: as `moe_routing` has them. `sort_slots(experts, E, keep=within_capacity(...))` puts the slots that were dropped past
the last end, where `grouped_matmul` makes zeros of them. Nothing is read from a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.moe_routing import sort_slots

__all__ = ["padded_rows", "within_capacity"]


def within_capacity(
    experts: Tensor, num_experts: int, capacity: int, *, scores: Tensor | None = None, first_choices: bool = True
) -> Tensor:
    """Return which slots are among the first, or the best, `capacity` slots of their expert, bool [T, k].

    See Lepikhin et al. 2021.

    Args:
        experts: int64 [T, k], each in 0..num_experts - 1. capacity: at least 0.
        scores: floats [T, k]: an expert keeps its highest; of equal ones the earlier. None: it keeps its earliest.
        first_choices: all first choices come before all second ones; else a token's choices come with the token.

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes.
    Cost: one counting sort of T * k slots, with scores a sort of them before it.
    """
    if capacity < 0:
        raise _call.refuse(f"capacity {capacity} is negative.")
    if scores is not None and (scores.shape != experts.shape or scores.device != experts.device):
        raise _call.refuse(
            f"scores: expected {list(experts.shape)} on {experts.device}; found {_call.describe(scores)}."
        )
    if experts.dim() != 2:
        raise _call.refuse(f"experts: expected int64 [tokens, choices]; found {_call.describe(experts)}.")
    # In the order in which experts take slots.
    turned = experts.t() if first_choices else experts
    asking = turned.reshape(-1)
    order = None
    if scores is not None:
        worth = (scores.t() if first_choices else scores).detach().reshape(-1)
        order = torch.sort(worth, descending=True, stable=True).indices
        asking = asking[order]
    p = sort_slots(asking[:, None], num_experts)
    starts = p.ends - p.counts
    within = p.rows[:, 0] - starts[asking] < capacity
    if order is not None:
        within = torch.empty_like(within).index_copy_(0, order, within)
    within = within.view(turned.shape)
    return within.t().contiguous() if first_choices else within


def padded_rows(ends: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Compute (index, valid), each [E, capacity], of a layout padded to `capacity` rows per expert.

    Args:
        ends: int64 [E], of a permutation none of whose experts has more than `capacity` rows.
    Returns: index int64: rows, 0 where there is none; valid bool. `y[index] * valid[..., None]` is the padded layout.
    """
    if ends.dim() != 1 or ends.dtype is not torch.int64 or capacity < 0:
        raise _call.refuse(f"ends: expected int64 [experts]; found {_call.describe(ends)}; capacity {capacity}.")
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))[: len(ends)]
    index = starts[:, None] + torch.arange(capacity, device=ends.device)
    valid = index < ends[:, None]
    return index.masked_fill(~valid, 0), valid
