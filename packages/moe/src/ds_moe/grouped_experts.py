"""All experts of a rank in one grouped product a layer, instead of one expert after the other.

The experts stay modules with parameters of their own, under the names that they always have. Their values lie one after the other in one piece of
memory per layer, which the grouped product takes as it is; where somebody moved them apart (ZeRO, a copy of the module), they are stacked in every
forward, which costs a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import UnsupportedError
from ds_moe.dispatch import DispatchRows
from ds_ops.grouped import grouped_matmul

__all__ = ["check_grouped", "compute_grouped", "lay_together", "lie_in"]

# What acts on every element by itself, so that rows of all experts go through one call of the first expert's.
_ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish, nn.Hardswish, nn.Identity)  # fmt: skip


def check_grouped(expert: nn.Module) -> None:
    """Raise UnsupportedError ("moe-grouped") unless `expert` is a `Sequential` of linear layers and elementwise activations."""
    layers = list(expert) if type(expert) is nn.Sequential else [expert]
    unknown = sorted({type(m).__name__ for m in layers if not (type(m) is nn.Linear or type(m) in _ELEMENTWISE)})
    if unknown or not any(type(m) is nn.Linear for m in layers):
        raise UnsupportedError(
            f"experts of {unknown or 'no linear layer'} cannot be computed by grouped products",
            code="moe-grouped",
            fix="Give an nn.Sequential of nn.Linear and activations without parameters, or leave grouped out.",
        )


def lay_together(experts: nn.ModuleList) -> tuple[Tensor, ...]:
    """Move each layer's weights of all experts into one tensor, of which the parameters become views. Values stay.

    Returns those tensors; none of parameters without memory.
    """
    groups = list(zip(*(expert.parameters() for expert in experts), strict=True))
    if any(type(p) is not nn.Parameter or p.is_meta or p.shape != group[0].shape for group in groups for p in group):
        return ()
    tensors = tuple(torch.stack([p.detach() for p in group]) for group in groups)
    for group, together in zip(groups, tensors, strict=True):
        for param, view in zip(group, together, strict=True):
            param.data = view
    return tensors


def compute_grouped(experts: nn.ModuleList, together: Sequence[Tensor], x: Tensor, rows: DispatchRows) -> Tensor:
    """Compute y[r] = expert of row r (x[r]) with one grouped product a linear layer; rows past the last end become finite.

    Args:
        together: What `lay_together` returned; () if the parameters were moved since.
    """
    weights: Sequence[Tensor | None] = together or [None for _ in experts[0].parameters()]
    stacked = iter([_Stack.apply(t, *g) for t, g in zip(weights, zip(*(e.parameters() for e in experts), strict=True), strict=True)])  # fmt: skip
    first = experts[0]
    for layer in first if isinstance(first, nn.Sequential) else [first]:
        if type(layer) is not nn.Linear:
            x = layer(x)
            continue
        weight: Tensor = next(stacked)
        bias: Tensor | None = None if layer.bias is None else next(stacked)
        if torch.is_autocast_enabled(x.device.type):
            narrow = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        x = grouped_matmul(x, weight, rows.ends, transpose=True, bias=bias)
    return x


def lie_in(together: Sequence[Tensor], experts: nn.ModuleList) -> bool:
    """Whether the parameters of `experts` are still views of these tensors."""
    groups = zip(*(expert.parameters() for expert in experts), strict=True)
    return bool(together) and all(
        param.shape == whole.shape[1:] and param.data_ptr() == whole[number].data_ptr() and param.dtype == whole.dtype
        for whole, group in zip(together, groups, strict=True)
        for number, param in enumerate(group)
    )


class _Stack(torch.autograd.Function):
    """[E, ...] of E parameters: the tensor that they are views of, or a copy."""

    @staticmethod
    def forward(ctx: Any, together: Tensor | None, *weights: Tensor) -> Tensor:
        return torch.stack(weights) if together is None else together.view_as(together)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].unbind(0)
