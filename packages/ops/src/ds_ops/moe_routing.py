"""Mixture of experts on one rank: which experts a token goes to, rows sorted by expert, and back. `grouped` has the products.

Words: T tokens, E experts, k experts a token. A *slot* is one (token, choice) pair, numbered token * k + choice. *Rows*
are slots sorted by expert; within an expert they keep the order of tokens. Nothing is padded, and nothing is dropped but
what a mask of `capacity` says: those slots come last, after the last end. Nothing is read from a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.registry import Op, absent_backend, choose, cpu_backend, reference_backend, register
from ds_ops.row_ops import gather_rows, gather_sum, row_products, weighed

__all__ = [
    "Gating",
    "Pulls",
    "RowPermutation",
    "permute",
    "pulls_of",
    "regroup",
    "sort_slots",
    "top_k_gating",
    "unpermute",
]


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """weights [T, k] fp32 with gradient; experts [T, k] int64, best first; counts [E] int64: slots of each expert."""

    weights: Tensor
    experts: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowPermutation:
    """slots [T * k]: the slot of each row; rows [T, k]: the row of each slot; ends [E]: where each expert's rows end.

    All int64. Rows at ends[-1] and later are slots that were dropped.
    """

    slots: Tensor
    rows: Tensor
    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """[E]: how many rows each expert has."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


def top_k_gating(logits: Tensor, k: int, *, renormalize: bool = False) -> Gating:
    """Select the k largest of p = softmax(logits) of each token, in fp32; among equals the lowest expert.

    Args:
        logits: [T, E] floats. renormalize: w = p / sum of the k chosen p.

    Raises:
        KernelError: "kernel-argument" if k is not in 1..E.
    Cost: a softmax (two passes) and a stable sort of [T, E]. Source: Shazeer et al. 2017, without its noise.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise _call.refuse(f"{k} of the experts of logits [tokens, experts] {_call.describe(logits)} cannot be chosen.")
    out: Gating = choose(_GATING, logits.device.type, logits.dtype).backend.run(logits, k, renormalize)
    return out


def sort_slots(experts: Tensor, num_experts: int, *, keep: Tensor | None = None) -> RowPermutation:
    """Sort slots by expert, keeping the order of tokens (a stable sort: slots of row r ascend within an expert).

    Args:
        experts: int64 [T, k], each in 0..num_experts - 1.
        keep: bool [T, k]: slots that are not kept come last, in their order, past the last end. None: all are kept.

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes, and on the CPU for an expert that is not there.
    Cost: two passes over T * k integers (counting sort); elsewhere a sort of them. Source: as torch.sort defines stable.
    """
    if experts.dim() != 2 or experts.dtype is not torch.int64:
        raise _call.refuse(f"experts: expected int64 [tokens, choices]; found {_call.describe(experts)}.")
    if keep is not None and (keep.shape != experts.shape or keep.dtype is not torch.bool):
        raise _call.refuse(f"keep: expected bool {list(experts.shape)}; found {_call.describe(keep)}.")
    if keep is not None and keep.device != experts.device:
        raise _call.refuse(f"keep: expected it on {experts.device}; found {_call.describe(keep)}.")
    out: RowPermutation = choose(_SORT, experts.device.type, experts.dtype).backend.run(experts, num_experts, keep)
    return out


def _native_sort(experts: Tensor, num_experts: int, keep: Tensor | None) -> RowPermutation:
    experts = _call.require("experts", experts.contiguous(), dtypes=(torch.int64,))
    mask = None if keep is None else _call.require("keep", keep.contiguous(), dtypes=(torch.bool,))
    slots, rows, ends = experts.new_empty(experts.numel()), torch.empty_like(experts), experts.new_empty(num_experts)
    status = _call.native().sort_slots(
        _call.address(experts), experts.numel(), num_experts, 0 if mask is None else _call.address(mask),
        _call.address(slots), _call.address(rows), _call.address(ends),
    )  # fmt: skip
    if status:
        raise _outside(experts, num_experts)
    return RowPermutation(slots, rows, ends)


def _outside(experts: Tensor, num_experts: int) -> KernelError:
    return _call.refuse(f"experts: {int(experts.min())}..{int(experts.max())} is outside 0..{num_experts - 1}.")


def _reference_sort(experts: Tensor, num_experts: int, keep: Tensor | None) -> RowPermutation:
    # On a GPU torch's own kernel traps; asking there would wait for the device, and a compiler has nothing to ask.
    known = experts.device.type == "cpu" and experts.numel() > 0 and not torch.compiler.is_compiling()
    if known and not 0 <= int(experts.numpy().min()) <= int(experts.numpy().max()) < num_experts:
        raise _outside(experts, num_experts)
    keys = (experts if keep is None else experts.masked_fill(~keep, num_experts)).reshape(-1)
    # A GPU sorts by digits: keys of two bytes take a quarter of the passes.
    ordered = torch.sort(keys.to(torch.int16 if num_experts < 1 << 15 else torch.int32), stable=True)
    slots = ordered.indices
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(slots.numel(), device=slots.device)
    numbers = torch.arange(num_experts, device=slots.device, dtype=ordered.values.dtype)
    return RowPermutation(slots, rows.view(experts.shape), torch.searchsorted(ordered.values, numbers, right=True))


@dataclass(frozen=True, slots=True, eq=False)
class Pulls:
    """Which rows of memory that P ranks share one rank takes, and where it finds its own again; each rank has `room` rows there.

    Attributes:
        inward: int64 [R]: the rows of this rank's experts, by expert, then by source, on their source rank.
        source: int64 [R]: the first row of the rank that each is of.
        home: int64: where each of this rank's rows is at its expert's, which keeps them in the order of its own `inward`. Without
            those that no expert has.
        ends: int64 [E / P]: where the rows of each of this rank's experts end.
    """

    inward: Tensor
    source: Tensor
    home: Tensor
    ends: Tensor


def pulls_of(counts: Tensor, rank: int, room: int) -> Pulls:
    """Compute the reads of a rank in an expert-parallel all-to-all through shared memory.

    Args:
        counts: int64 [P, E] on the CPU: each rank's rows for each expert, sorted by expert on that rank. Rank r has the
        experts
            [r * E / P, (r + 1) * E / P).
        room: Rows of a rank in the shared memory, at least as many as the rank has, and as its experts get.

    Raises:
        KernelError: "kernel-argument" for other shapes, dtypes, devices, and where there is not enough room.
    Cost: some integers a row. Source: the all-to-all of Lepikhin et al. 2020, seen from the reader.
    """
    fits = (
        counts.dim() == 2
        and counts.dtype is torch.int64
        and counts.device.type == "cpu"
        and 0 <= rank < counts.shape[0]
    )
    if not fits or counts.shape[1] == 0 or counts.shape[1] % counts.shape[0]:
        raise _call.refuse(
            f"counts of rank {rank}: expected int64 [ranks, experts] on the CPU; found {_call.describe(counts)}."
        )
    out: Pulls = choose(_PULLS, "cpu", counts.dtype).backend.run(counts, rank, room)
    return out


def _no_room(counts: Tensor, room: int) -> KernelError:
    return _call.refuse(f"counts: {counts.tolist()} of ranks and experts, and room for {room} rows of each rank.")


def _native_pulls(counts: Tensor, rank: int, room: int) -> Pulls:
    counts = _call.require("counts", counts.contiguous(), dtypes=(torch.int64,))
    ranks, experts = counts.shape
    indices, ends = counts.new_empty(3, room), counts.new_empty(experts // ranks)
    inward, source, home = indices.unbind()
    status = _call.native().pulls(
        _call.address(counts), ranks, experts, rank, room, *(_call.address(t) for t in (inward, source, home, ends))
    )
    if status:
        raise _no_room(counts, room)
    received = int(ends[-1])
    return Pulls(inward[:received], source[:received], home[: int(counts[rank].sum())], ends)


def _reference_pulls(counts: Tensor, rank: int, room: int) -> Pulls:
    ranks, experts = counts.shape
    local = experts // ranks
    expert_rows = counts.sum(0).view(ranks, local).sum(1)
    if max(int(expert_rows.max()), int(counts.sum(1).max())) > room or int(counts.min()) < 0:
        raise _no_room(counts, room)
    firsts = torch.arange(ranks, device="cpu") * room
    starts = counts.cumsum(1) - counts + firsts[:, None]  # of each rank and expert, the first row at home
    local_experts = slice(rank * local, (rank + 1) * local)
    number = counts[:, local_experts].t().reshape(-1)
    # What an expert's rank holds is in the order (expert, source), like what comes in here.
    expert_rows = counts.view(ranks, ranks, local).permute(1, 2, 0).reshape(ranks, -1)
    there = (expert_rows.cumsum(1) - expert_rows + firsts[:, None]).view(ranks, local, ranks)[:, :, rank].reshape(-1)
    inward, home = _runs(starts[:, local_experts].t().reshape(-1), number), _runs(there, counts[rank])
    return Pulls(
        inward, firsts.repeat(local).repeat_interleave(number), home, number.view(local, ranks).sum(1).cumsum(0)
    )


def _runs(starts: Tensor, number: Tensor) -> Tensor:
    """Concatenate for each i the number[i] consecutive numbers from starts[i] on."""
    before = number.cumsum(0) - number
    return (starts - before).repeat_interleave(number) + torch.arange(int(number.sum()), device="cpu")


def regroup(counts: Tensor, rows: int) -> RowPermutation:
    """Compute the permutation from chunks [source, expert] to chunks [expert, source], after an all-to-all of rows.

    Args:
        counts: int64 [S, E]: rows of each chunk, in the order of arrival. rows: their sum, known from the sizes
        received.
    Returns: a permutation of "tokens" with one choice: `permute(x, p)` moves rows to their experts, `p.ends` are
    theirs,
        and `unpermute(y, p)` moves results back.

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes.
    Cost: sums of S * E integers and two searches among them for each row, on the device.
    """
    if counts.dim() != 2 or counts.dtype is not torch.int64 or rows < 0:
        raise _call.refuse(f"counts: expected int64 [sources, experts]; found {_call.describe(counts)}; rows {rows}.")
    sources, experts = counts.shape
    arrived = counts.flatten().cumsum(0) - counts.flatten()  # first row of each chunk, as it came
    sizes = counts.t().flatten()
    ends = sizes.cumsum(0)
    # The number of each chunk in the order of arrival, listed by [expert, source].
    number = torch.arange(sources * experts, device=counts.device).view(sources, experts).t().flatten()
    place = torch.arange(rows, device=counts.device)
    chunk = torch.searchsorted(ends, place, right=True).clamp_(max=max(sources * experts - 1, 0))
    slots = place + (arrived[number] - ends + sizes)[chunk] if sources * experts else place
    back = torch.empty_like(slots)
    back[slots] = place
    expert_ends = ends.view(experts, sources)[:, -1] if sources else ends.new_zeros(experts)
    return RowPermutation(slots, back.view(rows, 1), expert_ends.contiguous())


def permute(x: Tensor, p: RowPermutation) -> Tensor:
    """Copy tokens to their rows: out[r] = x[slot of row r / k].

    The gradient gathers by `p.rows`, without atomic additions.

    Args:
        x: [T, n] of any dtype. p: of `sort_slots`, on the same device.
    Returns: [T * k, n].

    Raises:
        KernelError: "kernel-argument" if they do not fit.
    Cost: one read of x for each choice, one write. Source: Gale et al. 2022 (no padding, no dropping).
    """
    _require_permutation(x, p, tokens=True)
    out: Tensor = choose(_PERMUTE, x.device.type, x.dtype).backend.run(x, p)
    return out


def unpermute(y: Tensor, p: RowPermutation, weights: Tensor | None = None) -> Tensor:
    """Combine rows into tokens: out[t] = the sum over choices c of weights[t, c] * y[row of (t, c)].

    The sum is in fp32, rounded to y's dtype.

    Args:
        y: floats [T * k, n]. p: of `sort_slots` or `regroup`. weights: floats [T, k]; None: ones. All on one device.
    Returns: [T, n]. Gradients reach y and weights, without atomic additions.

    Raises:
        KernelError: "kernel-argument" if they do not fit.
    Cost: as `gather_sum`; backward gathers the gradient once and reads y once. Source: Gale et al. 2022.
    """
    _require_permutation(y, p, tokens=False)
    if weights is None:
        weights = torch.ones(p.rows.shape, device=y.device)
    if weights.shape != p.rows.shape or weights.device != y.device or not weights.is_floating_point():
        raise _call.refuse(f"weights: expected floats {list(p.rows.shape)}; found {_call.describe(weights)}.")
    out: Tensor = choose(_UNPERMUTE, y.device.type, y.dtype).backend.run(y, p, weights)
    return out


def _require_permutation(x: Tensor, p: RowPermutation, *, tokens: bool) -> None:
    """Whether x can be moved by p; its rows are tokens or slots."""
    whole = p.slots.dim() == 1 and p.rows.dim() == 2 and p.slots.numel() == p.rows.numel()
    kinds = all(t.dtype is torch.int64 and t.device == x.device for t in (p.slots, p.rows))
    wanted = p.rows.shape[:1] if tokens else p.slots.shape
    if not whole or not kinds or x.dim() != 2 or x.shape[:1] != wanted:
        raise _call.refuse(
            f"x {_call.describe(x)} and the permutation, slots {_call.describe(p.slots)}, rows {_call.describe(p.rows)},"
            " do not fit."
        )


def _reference_gating(logits: Tensor, k: int, renormalize: bool) -> Gating:
    scores = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    # A stable sort, because torch.topk does not say which of equal elements it takes.
    experts = torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Gating(weights, experts, _count(experts, logits.shape[1]))


def _count(values: Tensor, size: int) -> Tensor:
    """Count how often each number occurs, int64 [size].

    The length of bincount's result is unknown to a compiler.
    """
    flat = values.reshape(-1)
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def _reference_permute(x: Tensor, p: RowPermutation) -> Tensor:
    if torch.compiler.is_compiling():
        return x[p.slots // max(1, p.rows.shape[1])]
    out: Tensor = _Permute.apply(x, p.slots, p.rows)
    return out


def _reference_unpermute(y: Tensor, p: RowPermutation, weights: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        wide = torch.promote_types(y.dtype, torch.float32)
        return (y[p.rows].to(wide) * weights.to(wide)[..., None]).sum(1).to(y.dtype)
    out: Tensor = _Unpermute.apply(y, p.slots, p.rows, weights)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return gather_rows(x, slots, per=max(1, rows.shape[1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        return gather_sum(grads[0], rows), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y if ctx.needs_input_grad[3] else None, slots, rows, weights)
        return gather_sum(y, rows, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, slots, rows, weights = ctx.saved_tensors
        got = gather_rows(grads[0], slots, per=max(1, rows.shape[1]))
        of_weights = row_products(got, y)[rows].to(weights.dtype) if ctx.needs_input_grad[3] else None
        return weighed(got, weights.reshape(-1)[slots]) if ctx.needs_input_grad[0] else None, None, None, of_weights


def _composed(name: str, summary: str, why: str, run: Any, *, moves: bool = False) -> Op:
    backends = (absent_backend("cpu", f"not written: {why}"), reference_backend(run, moves=moves))
    return register(Op(name, summary, backends))


_SORT = register(
    Op(
        "sort_slots",
        "slots by expert",
        (cpu_backend(_native_sort, (torch.int64,)), reference_backend(_reference_sort, moves=True)),
    )
)
_PULLS = register(
    Op(
        "pulls_of",
        "rows of shared memory that experts take",
        (cpu_backend(_native_pulls, (torch.int64,)), reference_backend(_reference_pulls, moves=True)),
    )
)

_GATING = _composed("top_k_gating", "softmax and the k best experts", "a token has few experts", _reference_gating)
_PERMUTE = _composed(
    "permute", "tokens to rows sorted by expert", "`gather_rows` is one pass", _reference_permute, moves=True
)
_UNPERMUTE = _composed(
    "unpermute",
    "weighted sum of rows back to tokens",
    "`gather_sum` is one pass",
    _reference_unpermute,
)
