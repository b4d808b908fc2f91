"""Ulysses: attention over a sequence whose ranks each have a part of it (Jacobs et al., arXiv:2309.14509).

Before attention the ranks change from [sequence / N, all heads] to [sequence, heads / N], after it back. Any attention does
in between. Heads are dealt as tensor parallelism deals them: whole groups of a key-value head; fewer key-value heads than
ranks are sent to several of them; numbers of heads that do not divide give the first ranks one more.

Costs for N ranks, b bytes an element, d = heads x head size: forward (2 + 2 kv / heads) d b (N-1)/N a token, as much backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm import Group, GroupLike, as_group
from ds_comm.differentiable import InFlight, seq_all_to_all
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.heads import HeadCounts

__all__ = ["DistributedAttention", "HeadAssignment", "assign_heads", "rotate_half", "rotated"]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Heads over ranks.

    Attributes:
        queries: Query heads of each rank.
        keys: Key-value heads of each rank; together more than there are where ranks share them.
        sent: Which key-value head stands at each place of what is sent, in rank order; None: each once, as they are.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    sent: tuple[int, ...] | None


def assign_heads(heads: HeadCounts, ranks: int) -> HeadAssignment:
    """Assign query and key-value heads to ranks. Pure.

    Raises:
        PlanError: fewer query heads than ranks ("tensor-heads").
    """
    stretches = heads.stretches(ranks)
    sent = tuple(head for _, (first, last) in stretches for head in range(first, last))
    plain = sent == tuple(range(heads.key_value))
    return HeadAssignment(
        tuple(stop - start for (start, stop), _ in stretches),
        tuple(last - first for _, (first, last) in stretches),
        None if plain else sent,
    )


class DistributedAttention(nn.Module):
    """Any attention, over a sequence that the ranks of a group share.

    Args:
        local_attention: Called as `local_attention(query, key, value, *args, **kwargs)` with the whole sequence and this rank's
            heads; returns [..., heads, head size] in the layout of its query, or with the last two dims as one.
        sequence_process_group: The ranks that share a sequence, in the order of its parts.
        scatter_idx: Dim of the heads.
        gather_idx: Dim of the sequence.
        sp_stream: None. Exchanges run beside each other on the group's own stream.
        num_kv_heads: Key-value heads that keys have; by default as many as they come with.
    """

    shares_sequences = True  # an engine looks for it

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: GroupLike,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if sp_stream is not None:
            raise UnsupportedError(
                "DistributedAttention with a stream of the caller's",
                code="sequence-user-stream",
                fix="Leave sp_stream out: the exchanges of query, key and value are under way together anyway.",
            )
        self.local_attn = local_attention
        self.group: Group = as_group(sequence_process_group)
        self.scatter_idx, self.gather_idx, self.num_kv_heads = scatter_idx, gather_idx, num_kv_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        lengths: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of this rank's part of the queries to the whole sequence.

        Args:
            query: [..., sequence / N, ..., heads, ..., head size], the sequence at `gather_idx`, heads at
            `scatter_idx`.
            key, value: The same with key-value heads, whose number divides that of the heads.
            batch_dim_idx: The dim of the batch, as in DeepSpeed; different from the dims of heads and sequence.
            rotary_pos_emb: (cos, sin) for the whole sequence, applied to query and key by halves.
            lengths: Of each rank's part, where parts are of different lengths.
        Returns:
            As `query`, or with heads and head size as one dim if `local_attention` returns that.
        Raises:
            PlanError: heads do not fit ("tensor-heads"), or dims are named twice ("sequence-dims").
        """
        heads, seq, group = self.scatter_idx, self.gather_idx, self.group
        if batch_dim_idx in (heads, seq) or heads == seq:
            raise PlanError(
                f"batch_dim_idx = {batch_dim_idx}, scatter_idx = {heads}, gather_idx = {seq}",
                code="sequence-dims",
                fix="Name the dims of batch, heads and sequence: 1, 2, 0 for [s, b, h, d], 0, 2, 1 for [b, s, h, d].",
            )
        if self.num_kv_heads not in (None, key.shape[heads]):
            raise PlanError(
                f"DistributedAttention was made with num_kv_heads = {self.num_kv_heads}, and keys of shape {list(key.shape)} have {key.shape[heads]} at dim {heads}",
                code="tensor-heads",
                fix="Leave num_kv_heads out, or say how many heads keys have when they come.",
            )
        dealt = assign_heads(HeadCounts(query.shape[heads], key.shape[heads]), len(group.ranks))
        query, key, value = to_heads(query, key, value, dealt, (heads, seq), group, lengths)
        if rotary_pos_emb is not None:
            query, key = (rotated(t, *rotary_pos_emb) for t in (query, key))
        context = self.local_attn(query, key, value, *args, **kwargs)
        return to_sequence(context, dealt, (heads, seq), group, lengths)


def to_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dealt: HeadAssignment,
    dims: tuple[int, int],
    group: Group,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange parts of the sequence for parts of the heads, with three all-to-alls in flight at once.

    `dims`: of heads and of the sequence.
    """
    heads, seq = dims
    if dealt.sent is not None:
        index = torch.tensor(dealt.sent, device=key.device)
        key, value = key.index_select(heads, index), value.index_select(heads, index)

    def start(x: Tensor, sizes: tuple[int, ...]) -> InFlight:
        even = None if len(set(sizes)) == 1 else sizes
        flying: InFlight = seq_all_to_all(
            x, group, scatter_dim=heads, gather_dim=seq, scatter_sizes=even, gather_sizes=lengths, async_op=True
        )
        return flying

    flying = start(query, dealt.queries), start(key, dealt.keys), start(value, dealt.keys)
    return flying[0].wait(), flying[1].wait(), flying[2].wait()


def to_sequence(
    context: Tensor, dealt: HeadAssignment, dims: tuple[int, int], group: Group, lengths: Sequence[int] | None = None
) -> Tensor:
    """Exchange parts of the heads for parts of the sequence, the inverse of `to_heads`."""
    heads, seq = dims
    each = context.shape[heads] // dealt.queries[group.rank]  # head size, where the attention has folded it in
    sizes = None if len(set(dealt.queries)) == 1 else [n * each for n in dealt.queries]
    back: Tensor = seq_all_to_all(
        context, group, scatter_dim=seq, gather_dim=heads, scatter_sizes=lengths, gather_sizes=sizes
    )
    return back


def rotate_half(x: Tensor) -> Tensor:
    """Map the halves (a, b) of the last dim to (-b, a)."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of x [..., dim] by the angles of `cos` and `sin` [..., features].

    Other features do not change.
    """
    features, others = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    features = features * cos + rotate_half(features) * sin
    return torch.cat([features, others], -1) if others.shape[-1] else features
