"""Activations with what stands next to them: a bias before, a gate beside. Gradients keep the inputs only.

Arithmetic is torch's, fp32 inside for 16-bit tensors; autograd would keep every intermediate result, these recompute it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

import ds_ops._call as _call
from ds_ops.registry import Op, absent_backend, choose, reference_backend, register

__all__ = ["bias_gelu", "geglu", "swiglu"]


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Compute gelu(h) = h / 2 * (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))) of h = x + bias.

    See Hendrycks and Gimpel 2016.

    Args:
        x: [..., n] floats. bias: [n], same dtype and device.
        approximate: as in torch: "tanh", or "none" for h / 2 * (1 + erf(h / sqrt(2))).

    Raises:
        KernelError: "kernel-argument" if the bias does not fit, or for another word.
    Cost: two reads and two writes of x; the backward saves x + bias.
    """
    if bias.shape != x.shape[-1:] or bias.dtype != x.dtype or bias.device != x.device:
        raise _call.refuse(f"bias: expected one for {_call.describe(x)}; found {_call.describe(bias)}.")
    _require_word(approximate)
    out: Tensor = choose(_BIAS_GELU, x.device.type, x.dtype).backend.run(x, bias, approximate)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020).

    Args:
        gate, up: floats of one shape, dtype and device; halves of one tensor are fine.

    Raises:
        KernelError: "kernel-argument" if they differ.
    Cost: three reads, two writes; the backward saves gate and up, and no product.
    """
    return _gated(gate, up, functional.silu)


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Compute gelu(gate) * up with gelu(x) = x / 2 * (1 + erf(x / sqrt(2))) (Shazeer 2020). Else as `swiglu`.

    Args:
        approximate: as in torch: "none", or "tanh" for the approximation that `bias_gelu` has.
    """
    _require_word(approximate)
    return _gated(gate, up, functional.gelu if approximate == "none" else _tanh_gelu)


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _require_word(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise _call.refuse(f"approximate: expected 'none' or 'tanh'; found {approximate!r}.", "Pass one of the two.")


def _gated(gate: Tensor, up: Tensor, activation: Any) -> Tensor:
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise _call.refuse(f"up: expected one like gate, {_call.describe(gate)}; found {_call.describe(up)}.")
    if torch.compiler.is_compiling():
        product: Tensor = activation(gate) * up
        return product
    out: Tensor = choose(_GATED, gate.device.type, gate.dtype).backend.run(gate, up, activation)
    return out


def _reference_bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return functional.gelu(x + bias, approximate=approximate)


def _reference_gated(gate: Tensor, up: Tensor, activation: Any) -> Tensor:
    out: Tensor = _Gated.apply(gate, up, activation)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        product: Tensor = activation(gate) * up
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.activation(leaf)
        (dgate,) = torch.autograd.grad(active, leaf, grads[0] * up)
        return dgate, grads[0] * active.detach(), None


_WHY = "not written: torch's {} a pass more than a fused kernel would; torch.compile fuses it"
_BIAS_GELU = register(
    Op(
        "bias_gelu",
        "gelu of a sum with a bias",
        (absent_backend("cpu", _WHY.format("sum and gelu take")), reference_backend(_reference_bias_gelu)),
    )
)
_GATED = register(
    Op(
        "gated_activation",
        "silu or gelu of one half times the other",
        (absent_backend("cpu", _WHY.format("activation and product take")), reference_backend(_reference_gated)),
    )
)
