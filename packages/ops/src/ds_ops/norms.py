"""Layer norm and RMS norm over the last dim, also of a sum with a residual, with gradients.

Formulas: `ds_ops/reference/norms.py`. Statistics and products are fp32 or wider, results are rounded once to the dtype of
x. Native kernels read every input and write every output once (torch composes RMS norm of five passes); on the CPU layer norm is
torch's own, which does that already. Under torch.compile the reference runs: the compiler fuses it with
its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_ops._call as _call
import ds_ops.cuda_norms as cuda_norms
from ds_ops.reference import norms as reference
from ds_ops.registry import Op, choose, cpu_backend, cuda_backend, reference_backend, register, torch_backend
from ds_ops.threads import kernel_threads

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).

    Args:
        x: [..., n], fp32, bf16, fp16 (others through torch); copied if it is not contiguous.
        weight: [n] of any float dtype, or None.
    Returns: like x.

    Raises:
        KernelError: "kernel-argument" if the weight does not fit.
    Cost: one read, one write; backward two reads, one write. The same bits on any number of threads.
    """
    _require_vectors(x, weight, None)
    if torch.compiler.is_compiling():
        return reference.rms_norm(x, weight, eps)
    out: Tensor = choose(_RMS_NORM, x.device.type, x.dtype).backend.run(x, weight, eps)
    return out


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Compute (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, the variance biased (Ba et al. 2016).

    Args:
        x: floats [..., n]. weight, bias: [n] of any float dtype, or None.
    Returns: like x. Raises as `rms_norm`.
    Cost: one read, one write.
    """
    _require_vectors(x, weight, bias)
    out: Tensor = choose(_LAYER_NORM, x.device.type, x.dtype).backend.run(x, weight, bias, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute (rms_norm(s), s) with s = x + residual, rounded to x's dtype.

    Pre-norm blocks do this between layers (Xiong et al. 2020).

    x: [..., n], fp32, bf16, fp16. residual: like x. Cost: two reads, two writes, in place of three and two in two
    passes.
    """
    _require_vectors(x, weight, None)
    _require_like(x, residual)
    if torch.compiler.is_compiling():
        return _reference_add_rms_norm(x, residual, weight, eps)
    out: tuple[Tensor, Tensor] = choose(_ADD_RMS_NORM, x.device.type, x.dtype).backend.run(x, residual, weight, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Compute (layer_norm(s), s) with s = x + residual, rounded to x's dtype (Ba et al. 2016; Xiong et al. 2020).

    x: floats [..., n]. residual: like x. weight, bias: as in `layer_norm`. Cost: two reads, two writes on a CUDA device; elsewhere
    two passes.
    """
    _require_vectors(x, weight, bias)
    _require_like(x, residual)
    backend = choose(_ADD_LAYER_NORM, x.device.type, x.dtype).backend
    out: tuple[Tensor, Tensor] = backend.run(x, residual, weight, bias, eps)
    return out


def _require_like(x: Tensor, residual: Tensor) -> None:
    if (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise _call.refuse(f"residual: expected one like x, {_call.describe(x)}; found {_call.describe(residual)}.")


def _require_vectors(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() < 1 or not x.is_floating_point():
        raise _call.refuse(f"x: expected floats [..., n]; found {_call.describe(x)}.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (t.shape != x.shape[-1:] or t.device != x.device or not t.is_floating_point()):
            raise _call.refuse(f"{name}: expected floats [{x.shape[-1]}] on {x.device}; found {_call.describe(t)}.")


def _reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference.rms_norm(total, weight, eps), total


def _torch_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    odd = any(t is not None and t.dtype not in (x.dtype, torch.float32) for t in (weight, bias))
    mixed = weight is not None and bias is not None and weight.dtype is not bias.dtype
    if odd or mixed:  # torch takes parameters of x's dtype, or both fp32
        return reference.layer_norm(x, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_layer_norm(total, weight, bias, eps), total


def _reference_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference.layer_norm(total, weight, bias, eps), total


def _torch_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is not None and weight.dtype is not x.dtype:  # torch multiplies in the wider of both
        return reference.rms_norm(x, weight, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms_norm(total, weight, eps), total


# ---- native ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NormState:
    """What a forward leaves for its backward. h [..., n]: what was normalized; weight fp32 [n]; rstd fp32 [rows]."""

    h: Tensor
    weight: Tensor | None
    rstd: Tensor


def _at(t: Tensor | None) -> int:
    return 0 if t is None else _call.address(t)


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, _NormState]:
    cols = x.shape[-1]
    rows = x.numel() // cols if cols else 0
    threads = kernel_threads()
    total = torch.empty_like(x) if residual is not None else None
    y, rstd = torch.empty_like(x), torch.empty(rows, device="cpu")
    scratch = torch.empty(threads, cols, device="cpu")
    wide = None if weight is None else weight.detach().float().contiguous()
    addresses = tuple(map(_at, (x, residual, wide, total, y, rstd)))
    status = _call.native().norm(eps, rows, cols, _call.DTYPES[x.dtype], addresses, _at(scratch), threads)
    _call.finish("rms_norm", status)
    return y, _NormState(x if total is None else total, wide, rstd)


def _backward(
    saved: _NormState, dy: Tensor, dsum: Tensor | None, wanted: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the normalized input, and of the weight in dtype `wanted`.

    `dsum` is the gradient that reached the input by another path.
    """
    h, cols = saved.h, saved.h.shape[-1]
    native, threads = _call.native(), kernel_threads()
    dx, scratch = torch.empty_like(h), torch.empty(2 * threads, cols, device="cpu")
    partials = None if wanted is None else torch.zeros(native.norm_grad_blocks, cols, device="cpu")
    addresses = tuple(map(_at, (h, dy, dsum, saved.weight, saved.rstd, dx, partials)))
    rows = h.numel() // cols if cols else 0
    status = native.norm_grad(rows, cols, _call.DTYPES[h.dtype], addresses, _at(scratch), threads)
    _call.finish("rms_norm backward", status)
    return dx, None if partials is None else partials.sum(0).to(wanted)


def _cpu_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if not _differentiated(x, weight):
        return _forward(x.contiguous(), None, weight, eps)[0]
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


def _cpu_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if not _differentiated(x, residual, weight):
        y, saved = _forward(x.contiguous(), residual.contiguous(), weight, eps)
        return y, saved.h
    out: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, residual, weight, eps)
    return out


def _differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd has to hear of the call: to ask costs a tenth of what an autograd function does."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _wanted(weight: Tensor | None) -> torch.dtype | None:
    return weight.dtype if weight is not None and weight.requires_grad else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y, saved = _forward(x.contiguous(), None, weight, eps)
        ctx.wanted = _wanted(weight)
        ctx.save_for_backward(saved.h, saved.weight, saved.rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (*_backward(_NormState(*ctx.saved_tensors), grads[0].contiguous(), None, ctx.wanted), None)


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        y, saved = _forward(x.contiguous(), residual.contiguous(), weight, eps)
        ctx.wanted = _wanted(weight)
        ctx.save_for_backward(saved.h, saved.weight, saved.rstd)
        return y, saved.h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy, dsum = (g.contiguous() for g in grads)
        dx, dweight = _backward(_NormState(*ctx.saved_tensors), dy, dsum, ctx.wanted)
        return dx, dx, dweight, None


_RMS_NORM = register(
    Op(
        "rms_norm",
        "RMS norm and its gradient",
        (
            cuda_backend(cuda_norms.rms_norm),
            cpu_backend(_cpu_rms_norm),
            torch_backend(_torch_rms_norm),
            reference_backend(reference.rms_norm),
        ),
    )
)
_ADD_RMS_NORM = register(
    Op(
        "add_rms_norm",
        "RMS norm of a sum with a residual, and its gradient",
        (
            cuda_backend(cuda_norms.add_rms_norm),
            cpu_backend(_cpu_add_rms_norm),
            torch_backend(_torch_add_rms_norm),
            reference_backend(_reference_add_rms_norm),
        ),
    )
)
_LAYER_NORM = register(
    Op(
        "layer_norm",
        "layer norm and its gradient",
        (
            cuda_backend(cuda_norms.layer_norm),
            torch_backend(_torch_layer_norm),
            reference_backend(reference.layer_norm),
        ),
    )
)
_ADD_LAYER_NORM = register(
    Op(
        "add_layer_norm",
        "layer norm of a sum with a residual, and its gradient",
        (
            cuda_backend(cuda_norms.add_layer_norm),
            torch_backend(_torch_add_layer_norm),
            reference_backend(_reference_add_layer_norm),
        ),
    )
)
