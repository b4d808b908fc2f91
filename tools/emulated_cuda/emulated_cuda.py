"""Run CUDA's kernels of this process's torch on the CPU. Imported by `startup.py` when torch has been imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import emulated_kernels
import torch
from torch import Tensor

__all__ = ["ABSENT"]

ABSENT: list[str] = emulated_kernels.install()
"""Operators of CUDA that the CPU has no kernel for: they do nothing, but for those below."""
_SIZES_ONLY = "EMULATED_CUDA_SIZES_ONLY" in os.environ
_library = torch.library.Library("aten", "IMPL", "CUDA")


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~past, float("-inf"))
    return scores


def _alike(q: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in shared)


def _attend_sizes(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention leaves, without numbers: as large as on a card, whose kernels hold no scores."""
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)  # rows of a token lie together, as theirs do
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if _SIZES_ONLY:
        return _attend_sizes(q, v)
    k, v = _alike(q, k, v)
    scores = _scores(q, k, bias, is_causal, scale)
    sums = scores.logsumexp(-1)
    return ((scores - sums[..., None]).exp() @ v.float()).to(q.dtype), sums


def _attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:  # fmt: skip
    if _SIZES_ONLY:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(0)
    groups, grad = q.shape[1] // k.shape[1], grad.float()
    every_k, every_v = _alike(q, k, v)
    share = (_scores(q, every_k, bias, is_causal, scale) - sums[..., None]).exp()
    by_score = share * (grad @ every_v.float().transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    both = (by_score.transpose(-1, -2) @ q.float()) * factor, share.transpose(-1, -2) @ grad
    dk, dv = (one.unflatten(1, (-1, groups)).sum(2) for one in both)
    return ((by_score @ every_k.float()) * factor).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), by_score


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: Any = None
) -> tuple[Any, ...]:  # fmt: skip
    out, sums = _attend(q, k, v, None, is_causal, scale)
    state, unused = torch.zeros(2, dtype=torch.uint64, device="cpu"), torch.zeros((), dtype=torch.uint64, device="cpu")
    return out, sums, None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)


def _flash_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _attention_gradients(grad, q, k, v, None, out, sums, is_causal, scale)[:3]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_sums: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    none = torch.zeros((), dtype=torch.int64, device="cpu")
    return (*_attend(q, k, v, bias, is_causal, scale), none, none)


def _efficient_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Any, offset: Any,
    dropout_p: float, wanted: list[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dq, dk, dv, by_score = _attention_gradients(grad, q, k, v, bias, out, sums, is_causal, scale)
    return dq, dk, dv, by_score.to(bias.dtype) if bias is not None and wanted[3] else None


def _rms_norm_gradients(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    if _SIZES_ONLY:
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
    inner = tuple(range(x.dim() - len(shape), x.dim()))
    unit, grad = x.float() * rstd.float(), grad.float()
    by_weight = None if weight is None else (grad * unit).sum(tuple(range(inner[0]))).to(weight.dtype)
    through = grad if weight is None else grad * weight.float()
    return (rstd.float() * (through - unit * (through * unit).mean(inner, keepdim=True))).to(x.dtype), by_weight


def _interpret_in_place() -> None:
    """Let Triton's interpreter work on the memory of tensors of a card, and at the replays of a graph."""
    from triton.runtime.interpreter import GridExecutor

    run: Callable[..., None] = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if _SIZES_ONLY:
            return
        if emulated_kernels.capturing():
            emulated_kernels.record(lambda: run(self, *args, **kwargs))
        else:
            emulated_kernels.settle()
            run(self, *args, **kwargs)

    GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    GridExecutor._restore_args_dev = lambda self, *args: None
    GridExecutor.__call__ = call


torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
torch.backends.cuda.enable_flash_sdp(_SIZES_ONLY)
torch.backends.cuda.enable_mem_efficient_sdp(_SIZES_ONLY)
for _name, _function in {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_gradients,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_gradients,
    "_fused_rms_norm_backward": _rms_norm_gradients,
}.items():
    _library.impl(_name, _function)
if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_in_place()
