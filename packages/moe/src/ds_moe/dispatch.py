"""Tokens to experts on other ranks, and back: what expert parallelism does between routing and the weighted sum.

Words: T tokens with k choices each on this rank, P ranks in the expert group, E experts, E / P of them on each rank. *Rows* are
choices sorted by expert, so also by rank. What arrives is in *chunks*, one for each (source rank, local expert); experts
need them in the order (local expert, source rank).

    rows -> all-to-all -> chunks by source -> by expert -> experts -> by source -> all-to-all -> rows -> weighted sum

Nothing is padded, and nothing is dropped here: what the router dropped is never sent. Counts are exchanged once a layer; it is the
only time that the host waits for a device. A rank without tokens takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_accel import streams
from ds_comm import Group, all_to_all_single, differentiable
from ds_moe.expert_groups import ExpertGroups
from ds_moe.router_output import RouterOutput
from ds_moe.shm_dispatch import check_alike, make_reducer, pull_home, pull_rows, pull_tokens
from ds_ops.moe_routing import RowPermutation, permute, sort_slots, unpermute

__all__ = ["Compute", "DispatchRows", "TokenExchange", "WithShared", "exchange_of", "through_experts"]


@dataclass(frozen=True, slots=True, eq=False)
class DispatchRows:
    """Which rows are whose.

    Attributes:
        ends: int64 [local experts], on the rows' device: where the rows of each end. Rows past the last belong to no expert.
        bounds: The same numbers on the host, where they are known.
    """

    ends: Tensor
    bounds: tuple[int, ...] | None = None

    def on_host(self) -> tuple[int, ...]:
        """Return the ends of the experts' rows on the host; reads the device if the ends are only there."""
        return tuple(self.ends.tolist()) if self.bounds is None else self.bounds


class Compute(Protocol):
    """The experts of this rank."""

    def __call__(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Compute y[r] = expert of row r (x[r]). Rows past the last end may become anything finite."""


class WithShared:
    """The experts of this rank, beside shared experts that see all tokens: these are computed while tokens travel to other ranks.

    Args:
        compute: The experts of this rank.
        shared: Computes the shared experts' output; called once.
    """

    def __init__(self, compute: Compute, shared: Callable[[], Tensor]) -> None:
        self._compute, self._shared = compute, shared
        self._output: Tensor | None = None

    def __call__(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Compute this rank's experts."""
        return self._compute(x, rows)

    def shared_output(self) -> Tensor:
        """Return the shared experts' output, computed in the first call."""
        if self._output is None:
            self._output = self._shared()
        return self._output


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Who sends how many rows to whom, from the place of one rank. Pure numbers.

    Attributes:
        send: Rows for each rank of the group.
        receive: Rows from each.
        chunks: Of what is received, rows of each chunk, in order of arrival: by source, then by local expert.
        order: Which chunk comes first, second, ... when sorted by local expert, then by source.
        bounds: Where each local expert's rows end, after sorting.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    chunks: tuple[int, ...]
    order: tuple[int, ...]
    bounds: tuple[int, ...]


def exchange_of(send_counts: Sequence[int], receive_counts: Sequence[Sequence[int]]) -> TokenExchange:
    """Plan the all-to-all of a rank's rows.

    Args:
        send_counts: Rows of this rank for each expert of all ranks.
        receive_counts: Of each rank, its rows for each expert of this rank.
    """
    ranks, local = len(receive_counts), len(receive_counts[0])
    order = tuple(source * local + expert for expert in range(local) for source in range(ranks))
    totals = [sum(row[expert] for row in receive_counts) for expert in range(local)]
    bounds, end = [], 0
    for total in totals:
        end += total
        bounds.append(end)
    return TokenExchange(
        send=tuple(sum(send_counts[r * local : (r + 1) * local]) for r in range(ranks)),
        receive=tuple(sum(row) for row in receive_counts),
        chunks=tuple(count for row in receive_counts for count in row),
        order=order,
        bounds=tuple(bounds),
    )


def through_experts(
    x: Tensor, routed: RouterOutput, compute: Compute, places: ExpertGroups, *, weigh_first: bool = False
) -> Tensor:
    """Dispatch tokens to their experts, and combine the weighted outputs of each token in fp32.

    Args:
        x: [T, n]; T may differ between ranks, and be 0.
        compute: This rank's experts; `WithShared` beside others.
        weigh_first: Weights are put on the inputs of experts, not on their outputs.
    Returns: [T, m] in the dtype of the experts' output.

    Raises:
        CommError: ranks have rows of different width or dtype ("moe-ranks-differ").
    Cost: on one rank no read of the device. On P ranks, each way, the rows whose expert is elsewhere are sent, and
        rows are copied twice: sorted, and re-ordered where a rank has several experts. CPU ranks of one host take rows
        out
        of each other's memory instead (`shm_dispatch`): tokens are written once and gathered once, results written once
        and
        summed from there.
    """
    choices = sort_slots(routed.experts, routed.num_experts, keep=routed.kept_mask)
    weights = routed.weights
    if places.expert.size > 1 and x.device.type == "cpu" and places.windows.ask(places.expert):
        if weigh_first:
            x, weights = _weighed(permute(x, choices), choices, routed)
        way = make_reducer(x, choices, places.expert, places.windows, is_sorted=weigh_first)
        arrived = pull_rows(x, way) if weigh_first else pull_tokens(x, way)
        return pull_home(compute(arrived, DispatchRows(way.ends())), weights, way)
    rows = permute(x, choices)
    if weigh_first:
        rows, weights = _weighed(rows, choices, routed)
    if places.expert.size == 1:
        out = compute(rows, DispatchRows(choices.ends))
    else:
        out = _elsewhere(rows, choices.ends, compute, places.expert)
    return unpermute(out, choices, weights)


def _weighed(rows: Tensor, choices: RowPermutation, routed: RouterOutput) -> tuple[Tensor, Tensor]:
    """Multiply rows by their weights; return the rows and the weights that remain to be applied."""
    weights = routed.weights
    rows = rows * _ChoiceRows.apply(weights, choices.slots, choices.rows)[:, None].to(rows.dtype)
    return rows, torch.ones_like(weights) if routed.kept_mask is None else routed.kept_mask.to(weights.dtype)


def _elsewhere(rows: Tensor, ends: Tensor, compute: Compute, group: Group) -> Tensor:
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    local = counts.numel() // group.size
    # Two columns more say what a rank's rows are, so that ranks that differ raise an error and do not wait for bytes.
    facts = counts.new_tensor([rows.shape[1], rows.element_size()]).expand(group.size, 2)
    header = torch.cat((counts.view(group.size, local), facts), 1)
    got = torch.empty_like(header)
    all_to_all_single(got, header, group=group, unit="moe counts")
    both = torch.stack((header, got)).tolist()  # the one read of the device
    check_alike([row[local:] for row in both[1]], both[0][0][local:], group)
    plan = exchange_of([n for row in both[0] for n in row[:local]], [row[:local] for row in both[1]])
    sent = sum(plan.send)
    sent_rows = rows if sent == rows.shape[0] else rows[:sent]
    coming = differentiable.all_to_all_rows(
        sent_rows, group, plan.send, plan.receive, async_op=True, unit="moe dispatch"
    )
    if isinstance(compute, WithShared):
        compute.shared_output()  # in backward, too: its gradients are computed while those of tokens travel back
    arrived = coming.wait()
    in_order = reorder(arrived, plan.chunks, plan.order)
    bounds = streams.copy_to(torch.tensor(plan.bounds, dtype=torch.int64, device="cpu"), rows.device)
    out = compute(in_order, DispatchRows(bounds, plan.bounds))
    back = reorder(out, [plan.chunks[i] for i in plan.order], _inverse(plan.order))
    home = differentiable.all_to_all_rows(back, group, plan.receive, plan.send, unit="moe combine")
    if sent == rows.shape[0]:
        return home
    return torch.cat((home, home.new_zeros(rows.shape[0] - sent, home.shape[1])))


def reorder(x: Tensor, chunks: Sequence[int], order: Sequence[int]) -> Tensor:
    """Reorder the chunks of `x` to `order`.

    Cost: one copy; none if the chunks are in order.
    """
    present = [i for i in order if chunks[i]]
    if present == sorted(present):
        return x
    out: Tensor = _Reorder.apply(x, tuple(chunks), tuple(order))
    return out


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    at = {chunk: place for place, chunk in enumerate(order)}
    return tuple(at[chunk] for chunk in range(len(order)))


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        ctx.chunks, ctx.order = chunks, order
        parts = x.split(chunks)
        return torch.cat([parts[i] for i in order])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        there = [ctx.chunks[i] for i in ctx.order]
        return reorder(grads[0], there, _inverse(ctx.order)), None, None


class _ChoiceRows(torch.autograd.Function):
    """Values of choices [T, k] in the order of rows; the gradient takes the inverse order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return values.reshape(-1)[slots]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None
