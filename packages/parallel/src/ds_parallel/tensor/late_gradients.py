"""The gradient of a column layer's weight, computed after the gradient of its input: meanwhile the sum of that travels.

A linear layer's backward is two products. The ranks sum the gradient of the input, so it comes first and the sum starts; the gradient of the
weight is another node of autograd's graph, which waits until nothing else is ready:

    x -> linear -> y          backward: dx = dy W          then the sum of dx over the ranks starts
    W -> late --^             backward: dW = dy^T x        while it travels
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_parallel._torch import set_order

__all__ = ["late_linear"]


def late_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """Compute `functional.linear(x, weight, bias)`, whose gradient of `weight` comes late.

    Args:
        x: [..., in].
        weight: [out, in].
        number: Of the node that computes the gradient: among what is ready autograd takes the largest.
    Returns:
        [..., out], as under autocast where that is on.
    Cost: as functional.linear; `x` and the gradient of the result are kept until the weight's gradient is computed.
    """
    if x.dim() < 2 or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return functional.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    operands = _Operands()
    late = _LateWeight.apply(weight, operands)
    set_order(late.grad_fn, number)
    with torch.autocast(kind, enabled=False):
        result: Tensor = _InputLinear.apply(x, weight, late, bias, operands)
    return result


class _Operands:
    """What the weight's gradient is made of, from one node's backward to the other's."""

    __slots__ = ("grad", "x")

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.grad: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        x, grad, self.x, self.grad = self.x, self.grad, None, None
        if x is None or grad is None:
            raise RuntimeError("the gradient of a weight was asked for before that of its layer's result")
        return x, grad


class _LateWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, operands: _Operands) -> Tensor:
        ctx.operands = operands
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad = ctx.operands.take()
        return grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _InputLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, late: Tensor, bias: Tensor | None, operands: _Operands) -> Tensor:
        del late  # the same values, and the way of the gradient
        ctx.save_for_backward(x, weight)
        ctx.operands, ctx.has_bias = operands, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        ctx.operands.x, ctx.operands.grad = x, grad
        later = weight.new_zeros(()).expand_as(weight)  # nobody reads it: it starts the other node
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        return grad @ weight, None, later, bias_grad, None
