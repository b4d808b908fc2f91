"""Mixture of experts on one rank: which experts a token goes to, rows sorted by expert, a product per expert, and back.

Words: T tokens, E experts, k experts a token. A *slot* is one (token, choice) pair, numbered token * k + choice. *Rows*
are slots sorted by expert; within an expert they keep the order of tokens. Nothing is padded and nothing dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import _call
from ds_ops.registry import Op, absent_backend, choose, reference_backend, register

__all__ = ["Gating", "Permutation", "grouped_matmul", "permute", "sort_slots", "top_k_gating", "unpermute"]


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """weights [T, k] fp32 with gradient; experts [T, k] int64, best first; counts [E] int64: slots of each expert."""

    weights: Tensor
    experts: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Permutation:
    """slots [T * k]: the slot of each row; rows [T, k]: the row of each slot; ends [E]: where each expert's rows end."""

    slots: Tensor
    rows: Tensor
    ends: Tensor


def top_k_gating(logits: Tensor, k: int, *, renormalize: bool = False) -> Gating:
    """p = softmax(logits) over all experts in fp32, the k largest of each token; of equal ones the lowest expert.

    Args:
        logits: [T, E] floats. renormalize: w = p / sum of the k chosen p.

    Raises:
        KernelError: "kernel-argument" if k is not in 1..E.
    Cost: a softmax (two passes) and a stable sort of [T, E]. Source: Shazeer et al. 2017, without its noise.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise _bad(f"{k} of the experts of logits [tokens, experts] {_call.describe(logits)} cannot be chosen.")
    out: Gating = choose(_GATING, logits.device.type, logits.dtype).backend.run(logits, k, renormalize)
    return out


def sort_slots(experts: Tensor, num_experts: int) -> Permutation:
    """Sort slots by expert, keeping the order of tokens (a stable sort: slots of row r ascend within an expert).

    Args:
        experts: int64 [T, k], each in 0..num_experts - 1.

    Raises:
        KernelError: "kernel-argument" for other shapes and dtypes.
    Cost: a sort of T * k integers of 8 bytes, and three passes over them. Source: as torch.sort defines stable.
    """
    if experts.dim() != 2 or experts.dtype is not torch.int64:
        raise _bad(f"experts: expected int64 [tokens, choices]; found {_call.describe(experts)}.")
    # On a GPU torch's own kernel traps; asking there would wait for the device, and a compiler has nothing to ask.
    here = experts.device.type == "cpu" and experts.numel() > 0 and not torch.compiler.is_compiling()
    if here and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts:
        raise _bad(f"experts: {int(experts.min())}..{int(experts.max())} is outside 0..{num_experts - 1}.")
    out: Permutation = choose(_SORT, experts.device.type, experts.dtype).backend.run(experts, num_experts)
    return out


def _reference_sort(experts: Tensor, num_experts: int) -> Permutation:
    flat = experts.reshape(-1)
    slots = torch.sort(flat, stable=True).indices
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(slots.numel(), device=slots.device)
    ends = _count(flat, num_experts).cumsum(0)
    return Permutation(slots, rows.view(experts.shape), ends)


def permute(x: Tensor, p: Permutation) -> Tensor:
    """Rows of tokens: out[r] = x[slot of row r / k]. The gradient gathers by `p.rows`, without atomic additions.

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


def unpermute(y: Tensor, p: Permutation, weights: Tensor) -> Tensor:
    """Tokens of rows: out[t] = the sum over choices c of weights[t, c] * y[row of (t, c)], in fp32, rounded to y's dtype.

    Args:
        y: floats [T * k, n]. weights: floats [T, k]. p: of `sort_slots`. All on one device.
    Returns: [T, n].

    Raises:
        KernelError: "kernel-argument" if they do not fit.
    Cost: y is read, gathered and written, multiplied and summed: four passes. Source: Gale et al. 2022.
    """
    _require_permutation(y, p, tokens=False)
    if weights.shape != p.rows.shape or weights.device != y.device or not weights.is_floating_point():
        raise _bad(f"weights: expected floats {list(p.rows.shape)}; found {_call.describe(weights)}.")
    out: Tensor = choose(_UNPERMUTE, y.device.type, y.dtype).backend.run(y, p, weights)
    return out


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """y[rows of e] = x[rows of e] @ weights[e] for every expert e (Gale et al. 2022).

    Args:
        x: [N, a]; weights: [E, a, b], same dtype; ends: [E] int64, ascending, the last one N.
    Returns: [N, b].

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: one product per expert that has rows, each written into its part of one result. Reads `ends` on the host.
    """
    fits = x.dim() == 2 and weights.dim() == 3 and weights.shape[1] == x.shape[1] and ends.shape == weights.shape[:1]
    alike = weights.dtype == x.dtype and weights.device == x.device and ends.dtype is torch.int64 and not ends.is_meta
    if not fits or not alike:
        shown = ", ".join(f"{n} {_call.describe(t)}" for n, t in (("x", x), ("weights", weights), ("ends", ends)))
        raise _bad(f"{shown} do not fit.")
    bounds = ends.tolist()
    if bounds and (bounds[-1] != x.shape[0] or any(b < a for a, b in zip([0, *bounds], bounds, strict=False))):
        raise _bad(f"ends {bounds} do not cut {x.shape[0]} rows.")
    out: Tensor = choose(_GROUPED, x.device.type, x.dtype).backend.run(x, weights, bounds)
    return out


def _bad(message: str) -> KernelError:
    return KernelError(message, code="kernel-argument", fix="Give tensors the shapes of the docstring.")


def _require_permutation(x: Tensor, p: Permutation, *, tokens: bool) -> None:
    """Whether x can be moved by p; its rows are tokens or slots."""
    whole = p.slots.dim() == 1 and p.rows.dim() == 2 and p.slots.numel() == p.rows.numel()
    kinds = all(t.dtype is torch.int64 and t.device == x.device for t in (p.slots, p.rows))
    wanted = p.rows.shape[:1] if tokens else p.slots.shape
    if not whole or not kinds or x.dim() != 2 or x.shape[:1] != wanted:
        raise _bad(
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
    """int64 [size]: how often each number occurs. (bincount's result has a length that no compiler can know.)"""
    flat = values.reshape(-1)
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def _reference_permute(x: Tensor, p: Permutation) -> Tensor:
    if torch.compiler.is_compiling():
        return x[p.slots // max(1, p.rows.shape[1])]
    out: Tensor = _Permute.apply(x, p.slots, p.rows)
    return out


def _reference_unpermute(y: Tensor, p: Permutation, weights: Tensor) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    picked = (y[p.rows] if torch.compiler.is_compiling() else _Unsort.apply(y, p.slots, p.rows)).to(wide)
    return (picked * weights.to(wide)[..., None]).sum(1).to(y.dtype)


def _reference_grouped(x: Tensor, weights: Tensor, bounds: list[int]) -> Tensor:
    out: Tensor = _GroupedMatmul.apply(x, weights, bounds)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[slots // max(1, rows.shape[1])]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return grads[0][rows].sum(1, dtype=wide).to(grads[0].dtype), None, None


class _Unsort(torch.autograd.Function):
    """Rows back to [T, k, n]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return y[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0].flatten(0, 1)[ctx.saved_tensors[0]], None, None


def _parts(bounds: list[int]) -> list[tuple[int, slice]]:
    starts = [0, *bounds[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, bounds, strict=True)) if a < b]


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.bounds = bounds
        out = x.new_empty(x.shape[0], weights.shape[2])
        for e, rows in _parts(bounds):
            torch.mm(x[rows], weights[e], out=out[rows])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weights = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weights) if ctx.needs_input_grad[1] else None
        for e, rows in _parts(ctx.bounds):
            if dx is not None:
                torch.mm(dy[rows], weights[e].t(), out=dx[rows])
            if dw is not None:
                torch.mm(x[rows].t(), dy[rows], out=dw[e])
        return dx, dw, None


def _composed(name: str, summary: str, why: str, run: Any, *, moves: bool = False) -> Op:
    backends = (absent_backend("cpu", f"not written: {why}"), reference_backend(run, moves=moves))
    return register(Op(name, summary, backends))


_SORT = _composed("sort_slots", "slots by expert", "torch's stable sort", _reference_sort, moves=True)


_GATING = _composed("top_k_gating", "softmax and the k best experts", "a token has few experts", _reference_gating)
_PERMUTE = _composed(
    "permute", "tokens to rows sorted by expert", "torch's gather is one pass", _reference_permute, moves=True
)
_UNPERMUTE = _composed(
    "unpermute",
    "weighted sum of rows back to tokens",
    "gather, product and sum take two passes more",
    _reference_unpermute,
)
_GROUPED = _composed("grouped_matmul", "one product per expert", "BLAS does each product", _reference_grouped)
