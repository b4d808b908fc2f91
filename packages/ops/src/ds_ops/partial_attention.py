"""Attention to a part of the keys, with what it takes to merge parts: ring attention, split keys, chunked prefill.

Words: B batch, H heads of queries, G heads of keys and values (H a multiple of G: head h attends with head h // (H / G)),
Lq queries, Lk keys, D features. `lse` is log(sum over keys of exp(score)): with it results of disjoint sets of keys merge
exactly, and the gradient of a part follows from the merged result. A query that sees no key has out 0 and lse -inf.

A ring keeps (out, lse) merged over its steps, and calls `partial_attention_grad` with those for each part again: the sums
of what it returns are the gradients of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

import ds_ops._call as _call
import ds_ops._torch as _torch
from ds_ops.registry import Backend, Op, Unavailable, choose, reference_backend, register
from ds_ops.sparse_attention import Sparsity

__all__ = ["View", "merge_partial", "partial_attention", "partial_attention_grad"]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a query sees, and how scores are scaled.

    Attributes:
        causal: Query i sees keys up to i + Lk - Lq: the last query sees all.
        mask: Booleans (True: may be seen) or floats to add, that broadcast to [B, H, Lq, Lk]; or blocks, whose layout is
            [1 or H, blocks of queries, blocks of keys]. It has no gradient.
        scale: Factor of scores; None: 1 / sqrt(D).
    """

    causal: bool = False
    mask: Tensor | Sparsity | None = None
    scale: float | None = None


ALL = View()


def partial_attention(q: Tensor, k: Tensor, v: Tensor, view: View = ALL) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scale q k^T + mask) v over these keys, and lse, the log of the softmax's denominator.

    Args:
        q: floats [B, H, Lq, D]; k, v: [B, G, Lk, D] of its dtype, any strides.
    Returns: out [B, H, Lq, D] like q; lse [B, H, Lq] fp32 (fp64 of fp64). Gradients through both.

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: no [Lq, Lk] tensor on the CPU, and on CUDA for 16 bits without a mask (torch's flash kernels); elsewhere
    scores
        in fp32. A mask of blocks becomes one of booleans, unless it shows all or nothing. Source: Dao et al. 2022.
    """
    _require(q, k, v, view)
    job = _job(q, k, view)
    if torch.compiler.is_compiling():
        pair: tuple[Tensor, Tensor] = torch.ops.ds_ops.partial_attention(q, k, v, job.mask, job.causal, job.scale)
    elif torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        pair = _PartialAttention.apply(q, k, v, job.mask, job.causal, job.scale)
    else:
        pair = _attend(q, k, v, job.mask, job.causal, job.scale)
    return pair


def partial_attention_grad(
    dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, view: View = ALL
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of one part of the keys (Dao et al. 2022).

    With P = exp(scores - lse), dS = P (dout v^T - rowsum(dout out)).

    Args:
        dout, out: [B, H, Lq, D], dtype of q; lse: fp32 [B, H, Lq]: of the part, or merged over all parts.
        qkv: q, k, v of this part, as in `partial_attention`.
    Returns: like q, k, v. Over all parts, the dq add up; dk and dv are complete.

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: two and a half times `partial_attention`. Not differentiable.
    """
    q, k, v = qkv
    _require(q, k, v, view)
    if out.shape != q.shape or dout.shape != q.shape or lse.shape != q.shape[:-1]:
        shown = "; ".join(f"{n} {_call.describe(t)}" for n, t in (("dout", dout), ("out", out), ("lse", lse)))
        raise _call.refuse(f"{shown} do not fit q {_call.describe(q)}.")
    if any(t.dtype is not q.dtype or t.device != q.device for t in (dout, out)) or lse.device != q.device:
        raise _call.refuse(f"dout {dout.dtype} and out {out.dtype}: expected {q.dtype} on {q.device}.")
    if lse.dtype is not torch.promote_types(q.dtype, torch.float32):
        raise _call.refuse(f"lse: expected fp32, or fp64 for fp64; found {lse.dtype}.")
    job = _job(q, k, view)
    return _attend_grad(dout, q, k, v, out, lse, job.mask, job.causal, job.scale)


def merge_partial(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the partial attention of two sets of keys into (out, lse) of both.

    lse = log(e^lse1 + e^lse2), out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2.

    Args:
        out1, out2: floats [..., D]; lse1, lse2: floats [...]. A part without a visible key (out 0, lse -inf) changes
        nothing.
    Returns: out in the wider dtype of both (use fp32 for the running one), lse. Gradients through all four.

    Raises:
        KernelError: "kernel-argument" if shapes do not fit.
    Cost: about six passes over out in plain torch; the order of parts changes only the rounding. Source: Dao et al.
    2023.
    """
    if out1.shape != out2.shape or lse1.shape != out1.shape[:-1] or lse2.shape != lse1.shape:
        shown = "; ".join(map(_call.describe, (out1, lse1, out2, lse2)))
        raise _call.refuse(f"expected two of out [..., D] and lse [...]; found {shown}.")
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    one, two = (lse1 - top).exp(), (lse2 - top).exp()
    total = one + two
    blind = total == 0
    whole = total.masked_fill(blind, 1)
    dtype = torch.promote_types(out1.dtype, out2.dtype)
    out = out1 * (one / whole)[..., None] + out2 * (two / whole)[..., None]
    return out.to(dtype), (whole.log() + top).masked_fill(blind, -torch.inf)


# ---- refusals, and what is left to do ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionProblem:
    """A view without cases: mask is floats of q's dtype to add, or None; causal only where Lq is Lk and there is no mask."""

    mask: Tensor | None
    causal: bool
    scale: float


def _require(q: Tensor, k: Tensor, v: Tensor, view: View) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    alike = all(t.dtype is q.dtype and t.device == q.device for t in (k, v))
    if not fits or not alike or not q.is_floating_point() or (q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]):
        shown = "; ".join(map(_call.describe, (q, k, v)))
        raise _call.refuse(f"q [B, H, Lq, D], k and v [B, G, Lk, D]: found {shown}.")
    mask = view.mask
    if mask is None:
        return
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if isinstance(mask, Sparsity):
        blocks = [-(-n // mask.block) for n in (queries, keys)] if mask.block > 0 else []
        if mask.layout.dtype is not torch.bool or list(mask.layout.shape) not in ([1, *blocks], [heads, *blocks]):
            raise _call.refuse(f"layout: expected bool [1 or {heads}, *{blocks}]; found {_call.describe(mask.layout)}.")
        return
    whole = (batch, heads, queries, keys)
    fits = mask.dim() <= 4 and all(m in (1, w) for m, w in zip(reversed(mask.shape), reversed(whole), strict=False))
    if not fits or mask.device != q.device or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise _call.refuse(
            f"mask: expected booleans or floats that broadcast to {list(whole)}; found {_call.describe(mask)}."
        )
    if mask.requires_grad and torch.is_grad_enabled():
        raise _call.refuse("mask: it requires a gradient, and has none here.")


def _job(q: Tensor, k: Tensor, view: View) -> _AttentionProblem:
    scale = max(q.shape[-1], 1) ** -0.5 if view.scale is None else view.scale
    queries, keys = q.shape[2], k.shape[2]
    mask, causal = view.mask, view.causal
    if isinstance(mask, Sparsity):
        causal = causal or mask.causal
        shown = mask.layout.to(q.device)
        mask = shown.repeat_interleave(mask.block, 1).repeat_interleave(mask.block, 2)[None, :, :queries, :keys]
    if causal and (mask is not None or queries != keys):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype is torch.bool else mask.masked_fill(~visible, -torch.inf)
        causal = False
    if mask is None:
        return _AttentionProblem(None, causal, scale)
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    mask = mask.to(q.dtype)
    return _AttentionProblem(mask[(None,) * (4 - mask.dim())], causal, scale)


# ---- reference ---------------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Compute the masked scores, [B, G, H / G, Lq, Lk], fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[1]
    scores = q.to(wide).unflatten(1, (groups, -1)) @ k.to(wide)[:, :, None].transpose(-1, -2) * scale
    if mask is not None:
        whole = mask.to(wide).expand(*mask.shape[:1], q.shape[1], *mask.shape[2:])
        scores = scores + whole.unflatten(1, (groups, -1))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    p = (scores - _finite(lse)[..., None]).exp()
    out = (p @ v.to(p.dtype)[:, :, None]).flatten(1, 2)
    return out.to(q.dtype), lse.flatten(1, 2)


def _reference_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    groups, wide = (k.shape[1], -1), scores.dtype
    d, o, a = (t.to(wide).unflatten(1, groups) for t in (dout, out, q))
    p = (scores - _finite(lse).to(wide).unflatten(1, groups)[..., None]).exp()
    ds = p * (d @ v.to(wide)[:, :, None].transpose(-1, -2) - (d * o).sum(-1, keepdim=True))
    dq = (ds @ k.to(wide)[:, :, None]).flatten(1, 2) * scale
    dk = (ds.transpose(-1, -2) @ a).sum(2) * scale
    dv = (p.transpose(-1, -2) @ d).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf in `lse` by 0: a row without visible keys then has weights of zero."""
    return lse.masked_fill(lse == -torch.inf, 0)


# ---- torch's flash kernels ----------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not _flashes(q, k, mask):
        return _reference(q, k, v, mask, causal, scale)
    q, k, v = map(_in_rows, (q, k, v))
    if q.device.type == "cuda":
        result = _torch.scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return result[0], result[1]
    out, lse = _torch.scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # the kernel has 0 where nothing was seen
        lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
    return out, lse


def _flash_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _flashes(q, k, mask):
        return _reference_grad(dout, q, k, v, out, lse, mask, causal, scale)
    lse = _finite(lse)
    dout, q, k, v, out = map(_in_rows, (dout, q, k, v, out))
    if q.device.type == "cuda":
        # Seeds of dropout, which there is none of; no cumulative lengths, as all sequences are equally long.
        seeds = (
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.zeros((), dtype=torch.uint64, device=q.device),
        )
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _torch.scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, *seeds, scale=scale
        )
        return grads[0], grads[1], grads[2]
    dq, dk, dv = _torch.scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def _in_rows(t: Tensor) -> Tensor:
    """Return the tensor with a feature stride of 1, the only stride that the kernels do not read."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _flashes(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's kernel takes these: it wants something to do, and on CUDA no mask and whole vectors of features."""
    if not q.numel() or not k.numel():
        return False
    return q.device.type == "cpu" or (mask is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256)


def _no_flash(device_type: str, dtype: torch.dtype) -> str:
    if device_type not in ("cpu", "cuda"):
        return Unavailable("torch has kernels for CPU and CUDA", elsewhere=True)
    kinds = (torch.bfloat16, torch.float16) if device_type == "cuda" else tuple(_CPU_DTYPES)
    old = device_type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    if old and torch.cuda.get_device_capability() < (8, 0):
        return Unavailable("torch's flash attention wants compute capability 8.0")
    return "" if dtype in kinds else Unavailable(f"does not take {dtype}", fix=f"convert to {kinds[0]}")


_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# ---- autograd and compilers ---------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = choose(_ATTEND, q.device.type, q.dtype).backend.run(q, k, v, mask, causal, scale)
    return out.contiguous(), lse.contiguous()


def _attend_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    run = choose(_GRAD, q.device.type, q.dtype).backend.run
    dq, dk, dv = run(dout, q, k, v, out, lse, mask, causal, scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


Gradient = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal, scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.causal, ctx.scale = causal, scale
    ctx.set_materialize_grads(False)


def _backward(gradient: Gradient) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        if dlse is None:
            return (*gradient(dout, q, k, v, out, lse, mask, ctx.causal, ctx.scale), None, None, None)
        # lse moves as if each value had one feature more, of 1, whose output is not subtracted again: d lse / dS = P.
        d = q.shape[-1]
        wide = [functional.pad(t, (0, 8)) for t in (q, k, v, out, dout)]
        wide[2][..., d] = 1
        wide[4][..., d] = dlse.masked_fill(lse == -torch.inf, 0)
        grads = gradient(wide[4], *wide[:3], wide[3], lse, mask, ctx.causal, ctx.scale)
        return (*(t[..., :d].contiguous() for t in grads), None, None, None)

    return backward


class _PartialAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, mask, causal, scale)

    setup_context = staticmethod(_setup)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _backward(_attend_grad)(ctx, *grads)


@torch.library.custom_op("ds_ops::partial_attention", mutates_args=())
def _node(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, mask, causal, scale)


@torch.library.custom_op("ds_ops::partial_attention_grad", mutates_args=())
def _grad_node(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _attend_grad(dout, q, k, v, out, lse, mask, causal, scale)


@_node.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide)


@_grad_node.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_node.register_autograd(_backward(_grad_node), setup_context=_setup)

_ATTEND = register(
    Op(
        "partial_attention",
        "attention to some keys, with log-sum-exp",
        (Backend("torch", _flash, _no_flash), reference_backend(_reference)),
    )
)
_GRAD = register(
    Op(
        "partial_attention_grad",
        "the gradient of a part, from merged results",
        (Backend("torch", _flash_grad, _no_flash), reference_backend(_reference_grad)),
    )
)
