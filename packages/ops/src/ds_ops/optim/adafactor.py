"""Adafactor (Shazeer and Stern 2018): of a matrix's second moment, the sums of its rows and columns."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ds_ops.optim.optimizer_base import Group, OpsOptimizer, Params, require_rate
from ds_ops.update_rules import UpdateRule, UpdateSpec, UpdateTensors

__all__ = ["Adafactor"]


class Adafactor(OpsOptimizer):
    """Adafactor, with the arguments of torch.optim.Adafactor, and the two switches and the first moment of the paper.

    v = b v + (1-b) g^2, of matrices as row means times column means over their mean, b = 1 - t^beta2_decay; u = g / sqrt(v), divided by
    max(1, rms(u) / d); p = p (1 - lr wd) - rate u. The rate is min(lr, 1/sqrt(t)) max(eps2, rms(p)).

    relative_step: False: the rate does not fall as 1/sqrt(t); lr is what a schedule makes of it.
    scale_parameter: False: the rate is not multiplied by the parameter's root mean square.
    beta1: decay of a first moment of u, which then steps in its place; None for none. State of 4 bytes an element.

    State: `row_var` and `col_var` of the last two dims, or `variance` of vectors; `exp_avg` with beta1. `elementwise` is False: rows,
    columns and root mean squares are those of the whole parameter.
    Cost: about 8 passes of torch operations.
    """

    elementwise: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("variance",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        relative_step: bool = True,
        scale_parameter: bool = True,
        maximize: bool = False,
    ) -> None:
        require_rate("lr", lr)
        require_rate("-beta2_decay", -beta2_decay)
        require_rate("eps[0]", eps[0] or 0.0)
        require_rate("eps[1]", eps[1])
        require_rate("d - 1", d - 1)
        require_rate("weight_decay", weight_decay)
        require_rate("beta1", beta1 or 0.0, below=1.0)
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "relative_step": relative_step,
            "scale_parameter": scale_parameter,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def states_of(self, group: Group, p: Tensor) -> tuple[str, ...]:
        names = ("row_var", "col_var") if p.dim() > 1 else ("variance",)
        return names if group.get("beta1") is None else (*names, "exp_avg")

    def state_shape(self, group: Group, p: Tensor, name: str) -> tuple[int, ...] | None:
        shapes = {"row_var": (*p.shape[:-1], 1), "col_var": (*p.shape[:-2], 1, *p.shape[-1:])}
        return shapes.get(name)

    def spec(self, group: Group, step: int) -> UpdateSpec:
        rate = float(group["lr"])
        rate = min(rate, step**-0.5) if group.get("relative_step", True) else rate
        coefficients = (
            1 - float(group["lr"]) * float(group["weight_decay"]),
            step ** float(group["beta2_decay"]),
            rate,
        )
        return UpdateSpec(UpdateRule.SGD_PLAIN, coefficients)  # the rule has no name among the elementwise ones

    def step_bucket(self, group: Group, spec: UpdateSpec, tensors: UpdateTensors) -> None:
        for i, p in enumerate(tensors.params):
            states = [state[i] for state in tensors.states]
            wide = torch.promote_types(p.dtype, torch.float32)
            new = _stepped(group, spec, p.to(wide), tensors.grads[i].to(wide) * spec.grad_scale, states)
            p.copy_(new)
            if tensors.copies:
                tensors.copies[i].copy_(new)
            if spec.zero_grad:
                tensors.grads[i].zero_()


def _stepped(group: Group, spec: UpdateSpec, p: Tensor, g: Tensor, states: list[Tensor]) -> Tensor:
    """Advance the states of one parameter, and return its new values; p and g in fp32 or wider."""
    decay, share, rate = spec.coefficients
    eps1, eps2 = group["eps"]
    least = torch.finfo(p.dtype).eps if eps1 is None else float(eps1)
    size = _root_mean_square(p).clamp_(min=float(eps2)) if group.get("scale_parameter", True) else 1.0
    update = g * _second_moment(g, states, share, least).clamp_(min=least * least).rsqrt_()
    update.div_((_root_mean_square(update) / float(group["d"])).clamp_(min=1.0))
    beta1 = group.get("beta1")
    if beta1 is not None:
        states[-1].lerp_(update.to(states[-1].dtype), 1 - beta1)
        update = states[-1].to(p.dtype)
    return p * decay - update * (size * rate)


def _second_moment(g: Tensor, states: list[Tensor], share: float, least: float) -> Tensor:
    """Advance the means of squares by `share` of g^2; a fresh tensor of the second moment as they give it."""
    if g.dim() < 2:
        return states[0].lerp_(g.square(), share).clone()
    row, col = states[:2]
    squares = g.square()
    row.lerp_(squares.mean(-1, keepdim=True), share)
    col.lerp_(squares.mean(-2, keepdim=True), share)
    return (row @ col).div_(row.mean(-2, keepdim=True).clamp_(min=least))


def _root_mean_square(x: Tensor) -> Tensor:
    size = max(x.numel(), 1)
    norm: Tensor = torch.linalg.vector_norm(x)
    return norm / size**0.5
