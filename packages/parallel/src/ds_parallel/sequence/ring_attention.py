"""Ring attention: keys and values go round the ranks that share a sequence, and each rank merges what it sees of them.

Liu et al., arXiv:2310.01889. Words: a *part* is the tokens of one rank; it is one *chunk* of the sequence, or two of 2N chunks,
one from each end (*zigzag*), which gives every rank as much to do under a causal mask. A *pair* is a chunk of queries and a
chunk of keys: what of it is seen is decided before (`RingPlan.pairs`), so pairs that see nothing cost nothing.

Forward sends keys and values N-1 times while pairs are computed; backward sends them again, and their gradients N times.
With Ulysses around it (`DistributedAttention(RingAttention(plan, across), inside)`) the ranks of a host exchange heads and the
ring goes across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group, GroupLike, Work, as_group
from ds_comm.p2p import irecv, isend
from ds_config.errors import PlanError
from ds_ops.partial_attention import View, merge_partial, partial_attention, partial_attention_grad
from ds_parallel.heads import Stretch, spread

__all__ = ["Pair", "RingAttention", "RingPlan", "plan_ring"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Places of a part's queries and of another part's keys, and of the whole sequence that they are.

    Attributes:
        queries, keys: Inside the two parts.
        queries_at, keys_at: Inside the whole.
        causal: The two are one chunk, under a causal mask; else every query sees every key.
    """

    queries: slice
    keys: slice
    queries_at: Stretch
    keys_at: Stretch
    causal: bool


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Which chunks of a sequence each rank has, in the order it has them."""

    chunks: tuple[tuple[Stretch, ...], ...]

    def length(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return sum(stop - start for start, stop in self.chunks[rank])

    def part(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """Return a rank's tokens of a whole tensor."""
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in self.chunks[rank]], dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate all ranks' parts in the order of the sequence."""
        pieces: list[tuple[int, Tensor]] = []
        for chunks, part in zip(self.chunks, parts, strict=True):
            sizes = [stop - start for start, stop in chunks]
            pieces += zip((start for start, _ in chunks), part.split(sizes, dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])], dim)

    def pairs(self, rank: int, source: int, causal: bool) -> tuple[Pair, ...]:
        """List the pairs of chunks in which `rank`'s queries attend to `source`'s keys."""
        visible = []
        for queries, at in _places(self.chunks[rank]):
            for keys, key_at in _places(self.chunks[source]):
                hidden = causal and key_at[0] > at[0]
                if not hidden and at[0] < at[1] and key_at[0] < key_at[1]:
                    visible.append(Pair(queries, keys, at, key_at, causal and key_at == at))
        return tuple(visible)

    def work(self, rank: int, causal: bool) -> int:
        """Scores that a rank computes, half of a pair that is causal."""
        total = 0
        for source in range(len(self.chunks)):
            for pair in self.pairs(rank, source, causal):
                area = (pair.queries_at[1] - pair.queries_at[0]) * (pair.keys_at[1] - pair.keys_at[0])
                total += area // 2 if pair.causal else area
        return total


def plan_ring(length: int, ranks: int, *, zigzag: bool = True) -> RingPlan:
    """Plan the chunks of a sequence for each rank. Pure.

    Args:
        zigzag: Two chunks a rank, from both ends: balanced under a causal mask.
    """
    if not zigzag:
        return RingPlan(tuple((stretch,) for stretch in spread(length, ranks)))
    chunks = spread(length, 2 * ranks)
    return RingPlan(tuple((chunks[rank], chunks[2 * ranks - 1 - rank]) for rank in range(ranks)))


class RingAttention:
    """Attention of this rank's queries to the whole sequence: [batch, part, heads, head size] in and out.

    Args:
        plan: Which rank has which tokens.
        group: The ranks, in the plan's order.
        causal: No query sees a later key.
        scale: Factor of scores; 1 / sqrt(head size) by default.
    """

    def __init__(self, plan: RingPlan, group: GroupLike, *, causal: bool = True, scale: float | None = None) -> None:
        self.plan, self.group, self.causal, self.scale = plan, as_group(group), causal, scale
        if len(plan.chunks) != self.group.size:
            raise PlanError(
                f"a ring of {len(plan.chunks)} parts on {self.group}",
                code="sequence-ring",
                fix="Make the plan with the size of the group.",
            )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute the attention of this rank's queries to the keys and values of all ranks.

        Args:
            query: [batch, part, heads, head size]; key and value the same, with a number of heads that divides that of
            query.
            documents: [batch, whole sequence], the same on all ranks: the document of each token; tokens attend to
            their
                document only.
        Raises:
            PlanError: the part has another length than the plan says ("sequence-ring").
        """
        expected = self.plan.length(self.group.rank)
        if query.shape[1] != expected or key.shape[1] != expected:
            raise PlanError(
                f"this rank has {query.shape[1]} queries and {key.shape[1]} keys, by the plan {expected}",
                code="sequence-ring",
                fix="Cut sequences with plan.part, and make a plan for every length.",
            )
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out: Tensor = _RingAttention.apply(q, k, v, self, documents)
        return out.transpose(1, 2)

    def view(self, pair: Pair, documents: Tensor | None) -> View | None:
        """Return the attention mask and scale of a pair of chunks; None if no query attends to any key."""
        if documents is None:
            return View(pair.causal, None, self.scale)
        query_documents = documents[:, pair.queries_at[0] : pair.queries_at[1], None]
        visible = query_documents == documents[:, None, pair.keys_at[0] : pair.keys_at[1]]
        if not bool(visible.any()):
            return None
        return View(pair.causal, None if bool(visible.all()) else visible.unsqueeze(1), self.scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention, documents: Tensor | None) -> Tensor:
        plan, group = ring.plan, ring.group
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        both = torch.stack([k, v])
        for source, keys, values in _round(both, plan, group):
            for pair in plan.pairs(group.rank, source, ring.causal):
                view = ring.view(pair, documents)
                if view is None:
                    continue
                at = pair.queries
                partials = partial_attention(q[:, :, at], keys[:, :, pair.keys], values[:, :, pair.keys], view)
                out[:, :, at], lse[:, :, at] = merge_partial(out[:, :, at], lse[:, :, at], *partials)
        result = out.to(q.dtype)
        ctx.ring, ctx.documents = ring, documents
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        plan, group = ring.plan, ring.group
        dout = grads[0].contiguous()
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        passed = _Passed(k, lse.dtype, plan, group)
        for source, keys, values in _round(torch.stack([k, v]), plan, group):
            grads_kv = torch.zeros((2, *keys.shape), dtype=lse.dtype, device=q.device)
            for pair in plan.pairs(group.rank, source, ring.causal):
                view = ring.view(pair, ctx.documents)
                if view is None:
                    continue
                at, there = pair.queries, pair.keys
                qkv = (q[:, :, at], keys[:, :, there], values[:, :, there])
                grads_qkv = partial_attention_grad(dout[:, :, at], qkv, out[:, :, at], lse[:, :, at].contiguous(), view)
                dq[:, :, at] += grads_qkv[0]
                grads_kv[0][:, :, there] += grads_qkv[1]
                grads_kv[1][:, :, there] += grads_qkv[2]
            passed.on(grads_kv)
        dk, dv = passed.home()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _round(both: Tensor, plan: RingPlan, group: Group) -> Any:
    """Yield (source rank, keys, values) of every rank, this rank's first; the next transfer overlaps with their use."""
    rank, size = group.rank, group.size
    current = both.contiguous()
    for step in range(size):
        source, works = (rank - step) % size, []
        following = current
        if step < size - 1:
            length = plan.length((source - 1) % size)
            following = current.new_empty((*both.shape[:3], length, both.shape[4]))
            works = _shift(current, following, group, tag=2)
        yield source, current[0], current[1]
        for work in works:
            work.wait()
        current = following


class _Passed:
    """Gradients of keys and values on their way round: each rank adds its own, the owner gets the sum."""

    def __init__(self, k: Tensor, dtype: torch.dtype, plan: RingPlan, group: Group) -> None:
        self.k, self.dtype, self.plan, self.group = k, dtype, plan, group
        self.step = 0
        self.sent: list[Tensor] = []
        self.works: list[Work] = []
        self.coming: Tensor | None = None

    def on(self, total: Tensor) -> None:
        """Add what the previous rank sent, and send it on."""
        group = self.group
        if self.coming is not None:
            for work in self.works:
                work.wait()
            total += self.coming
        if group.size == 1:
            self.coming = total
            return
        following = (group.rank - self.step - 1) % group.size  # whose come next; after the last step, our own
        shape = (2, *self.k.shape[:2], self.plan.length(following), self.k.shape[3])
        self.coming = torch.empty(shape, dtype=self.dtype, device=self.k.device)
        self.sent = [total]  # must not change until it is sent
        self.works = _shift(total, self.coming, group, tag=3)
        self.step += 1

    def home(self) -> tuple[Tensor, Tensor]:
        for work in self.works:
            work.wait()
        if self.coming is None:
            raise RuntimeError("no gradient went round")
        return self.coming[0], self.coming[1]


def _shift(sent: Tensor, received: Tensor, group: Group, tag: int) -> list[Work]:
    """Send `sent` to the next rank and receive `received` from the previous rank.

    Even ranks send first, so that backends whose sends wait for the receive do not deadlock.
    """
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    send = lambda: isend(sent, group=group, group_dst=after, tag=tag, unit="ring")  # noqa: E731
    receive = lambda: irecv(received, group=group, group_src=before, tag=tag, unit="ring")  # noqa: E731
    return [send(), receive()] if group.rank % 2 == 0 else [receive(), send()]


def _places(chunks: Sequence[Stretch]) -> list[tuple[slice, Stretch]]:
    places, at = [], 0
    for start, stop in chunks:
        places.append((slice(at, at + stop - start), (start, stop)))
        at += stop - start
    return places
