"""Chooses and launches the CUDA kernels of `native/cuda/norm.cu`: RMS norm, layer norm, sums with a residual, and their gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_ops.cuda_launch import launch
from ds_ops.kernel_source import CudaKernel

__all__ = [
    "KERNELS",
    "NormInput",
    "NormShape",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "norm",
    "norm_grad",
    "norm_grad_kernel",
    "norm_kernel",
    "rms_norm",
]

_FORWARD = "PPPPPPPPqqffii"
_BACKWARD = "PPPPPPPPPqqqfii0q"
_ANY = CudaKernel("norm.cu", "any_norm", "NormCall", _FORWARD)
_ANY_GRAD = CudaKernel("norm.cu", "any_norm_grad", "NormGradCall", _BACKWARD)
_NAMES = ("Dtype::f32", "Dtype::bf16", "Dtype::f16")
_BLOCKS = (
    256  # that share the rows of a gradient: partial sums of the weights are [blocks, cols]; fixed, so that sums are
)
_TEAMS = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class NormShape:
    """What decides which kernel runs. dtype, weight: numbers of `_call.DTYPES`. centre: layer norm. extra: residual, or dsum."""

    cols: int
    dtype: int
    weight: int
    centre: bool
    extra: bool


@dataclass(frozen=True, slots=True)
class NormInput:
    """What is normalized: x [..., n], contiguous. residual: like x, or None. weight, bias: [n] of one dtype, or None."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centre: bool


def _team(cols: int, dtype: int, most: int) -> tuple[int, int] | None:
    """Choose how many threads take a row, and how many 16-byte pieces each of them keeps: at most `most`, or twice that in a long row."""
    count = 4 if dtype == 0 else 8
    if cols % count:
        return None
    vectors = cols // count
    for team in _TEAMS:
        if vectors <= team * (most if team < _TEAMS[-1] else 2 * most):
            return team, -(-vectors // team)
    return None


@functools.lru_cache(maxsize=256)
def norm_kernel(shape: NormShape) -> CudaKernel:
    """Choose the forward kernel for rows at aligned addresses; `any_norm` for rows that do not move in whole pieces."""
    team = _team(shape.cols, shape.dtype, 4)
    if team is None:
        return _ANY
    flags = f"{_word(shape.centre)}, {_word(shape.extra)}"
    instance = f"norm<{_NAMES[shape.dtype]}, {_NAMES[shape.weight]}, {team[0]}, {team[1]}, {flags}>"
    return CudaKernel("norm.cu", instance, "NormCall", _FORWARD, max(256, team[0]), 4 if team[0] <= 256 else 2)


@functools.lru_cache(maxsize=256)
def norm_grad_kernel(shape: NormShape) -> CudaKernel:
    """Choose the backward kernel, as `norm_kernel` does."""
    team = _team(shape.cols, shape.dtype, 2)
    if team is None:
        return _ANY_GRAD
    flags = f"{_word(shape.centre)}, {_word(shape.extra)}"
    instance = f"norm_grad<{_NAMES[shape.dtype]}, {_NAMES[shape.weight]}, {team[0]}, {team[1]}, {flags}>"
    return CudaKernel("norm.cu", instance, "NormGradCall", _BACKWARD, max(256, team[0]), 2 if team[0] <= 256 else 1)


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _shape(like: Tensor, weight: Tensor | None, centre: bool, extra: bool) -> NormShape:
    dtype = _call.DTYPES[like.dtype]
    return NormShape(like.shape[-1], dtype, dtype if weight is None else _call.DTYPES[weight.dtype], centre, extra)


def _at(t: Tensor | None) -> int:
    return 0 if t is None else _call.address(t)


def _aligned(addresses: tuple[int, ...]) -> bool:
    return all(address % 16 == 0 for address in addresses)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def norm(n: NormInput) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Normalize rows on the current stream, where the results are valid.

    Returns: y, what was normalized (x, or x + residual), the means (None for RMS norm) and 1 / deviation of each row, fp32.
    """
    x, cols = n.x, n.x.shape[-1]
    y, rstd = torch.empty_like(x), torch.empty(_rows(x), device=x.device)
    total = None if n.residual is None else torch.empty_like(x)
    mean = torch.empty_like(rstd) if n.centre else None
    pointers = tuple(map(_at, (x, n.residual, n.weight, n.bias, total, y)))
    shape = _shape(x, n.weight if n.weight is not None else n.bias, n.centre, n.residual is not None)
    kernel = norm_kernel(shape) if _aligned(pointers) else _ANY
    blocks = rstd.numel() if kernel is _ANY else -(-rstd.numel() * _team_of(kernel) // kernel.threads)
    statistics = _at(mean), _at(rstd)
    numbers = rstd.numel(), cols, n.eps, 1.0 / max(cols, 1), shape.dtype, shape.weight
    launch(kernel, x.device, blocks if cols else 0, *pointers, *statistics, *numbers)
    return y, x if total is None else total, mean, rstd


@functools.lru_cache(maxsize=256)
def _team_of(kernel: CudaKernel) -> int:
    return int(kernel.instance.split(",")[2])


def norm_grad(
    n: NormInput, dy: Tensor, dsum: Tensor | None, statistics: tuple[Tensor | None, Tensor], sums: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of what was normalized (`n.x`), of the weight and of the bias, on the current stream.

    Args:
        dsum: the gradient that reached `n.x` by another way. statistics: mean and rstd of `norm`.
        sums: whether gradients of weight and bias are wanted; they are fp32 [n].
    """
    h, cols = n.x, n.x.shape[-1]
    mean, rstd = statistics
    dx = torch.empty_like(h)
    rows = _rows(h)
    pointers = tuple(map(_at, (h, dy, dsum, n.weight)))
    shape = _shape(h, n.weight, n.centre, dsum is not None)
    kernel = norm_grad_kernel(shape) if _aligned((*pointers, _at(dx))) else _ANY_GRAD
    blocks = min(rows, _BLOCKS)
    per_block = -(-rows // blocks) if blocks else 0
    blocks = -(-rows // per_block) if per_block else 0
    make = torch.zeros if kernel is _ANY_GRAD else torch.empty
    partials = [make(blocks, cols, device=h.device) if wanted else None for wanted in sums]
    numbers = rows, cols, per_block, 1.0 / max(cols, 1), shape.dtype, shape.weight
    launch(
        kernel, h.device, blocks if cols else 0, *pointers, _at(mean), _at(rstd), _at(dx), *map(_at, partials), *numbers
    )
    dweight, dbias = (None if p is None else p.sum(0) for p in partials)
    return dx, dweight, dbias


# ---- with gradients ---------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Run RMS norm on the current stream, with its gradient."""
    return _norm(x, None, (weight, None), eps, False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Run RMS norm of x + residual on the current stream; the sum is the second result."""
    return _norm(x, residual, (weight, None), eps, False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Run layer norm on the current stream, with its gradient."""
    return _norm(x, None, (weight, bias), eps, True)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Run layer norm of x + residual on the current stream; the sum is the second result."""
    return _norm(x, residual, (weight, bias), eps, True)


def _norm(
    x: Tensor, residual: Tensor | None, vectors: tuple[Tensor | None, Tensor | None], eps: float, centre: bool
) -> tuple[Tensor, Tensor]:
    every = (x, residual, *vectors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in every):
        out: tuple[Tensor, Tensor] = _CudaNorm.apply(*every, eps, centre)
        return out
    y, h, _mean, _rstd = norm(_input(x, residual, vectors, eps, centre))
    return y, h


def _input(
    x: Tensor, residual: Tensor | None, vectors: tuple[Tensor | None, Tensor | None], eps: float, centre: bool
) -> NormInput:
    """Bring the vectors to one dtype that the kernel reads: their own, or fp32 where they differ."""
    there = [t for t in vectors if t is not None]
    alike = len({t.dtype for t in there}) == 1 and there[0].dtype in _call.DTYPES
    weight, bias = (None if t is None else (t.detach() if alike else t.detach().float()).contiguous() for t in vectors)
    return NormInput(x.contiguous(), None if residual is None else residual.contiguous(), weight, bias, eps, centre)


class _CudaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *a: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight, bias, eps, centre = a
        n = _input(x, residual, (weight, bias), eps, centre)
        y, h, mean, rstd = norm(n)
        ctx.numbers = eps, centre, residual is not None
        ctx.wanted = tuple(None if t is None or not t.requires_grad else t.dtype for t in (weight, bias))
        ctx.save_for_backward(h, n.weight, mean, rstd)
        if residual is None:
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        h, weight, mean, rstd = ctx.saved_tensors
        eps, centre, summed = ctx.numbers
        dsum = grads[1].contiguous() if summed else None
        back = NormInput(h, None, weight, None, eps, centre)
        sums = (ctx.wanted[0] is not None, ctx.wanted[1] is not None)
        dx, *vectors = norm_grad(back, grads[0].contiguous(), dsum, (mean, rstd), sums)
        dweight, dbias = (None if v is None else v.to(d) for v, d in zip(vectors, ctx.wanted, strict=True))
        return dx, dx if summed else None, dweight, dbias, None, None


def _table() -> tuple[CudaKernel, ...]:
    """List what is worth making ahead of time: bf16 and fp32 rows of the usual lengths, weights of their dtype."""
    cols = (768, 1024, 2048, 4096, 5120, 8192, 16384)
    shapes = [
        NormShape(c, d, d, centre, extra)
        for c in cols
        for d in (1, 0)
        for centre in (False, True)
        for extra in (False, True)
    ]
    return tuple(dict.fromkeys((_ANY, _ANY_GRAD, *map(norm_kernel, shapes), *map(norm_grad_kernel, shapes))))


KERNELS = _table()
