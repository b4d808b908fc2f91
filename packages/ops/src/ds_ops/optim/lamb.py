"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_ops.apply_update import lamb_apply, lamb_moments
from ds_ops.optim.optimizer_base import OpsOptimizer, Params, require_rate
from ds_ops.reference import update as reference
from ds_ops.update_rules import AdamHyper, UpdateRule, UpdateSpec, UpdateTensors, lamb_coefficients

__all__ = ["Lamb"]


class Lamb(OpsOptimizer):
    """u = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd p;  p = p - lr clamp(|p|/|u|, min_coeff, max_coeff) u.

    The ratio of norms is per tensor, and 1 where either norm is 0, so tensors must be stepped whole: `elementwise` is
    False. With `eps_inside_sqrt` the denominator is sqrt(v/(1-b2^t) + eps).

    Cost: two passes, 40 bytes an element with fp32 everything. State: 8 bytes an element.
    """

    elementwise: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        eps_inside_sqrt: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay, "min_coeff": min_coeff}.items():
            require_rate(name, value)
        require_rate("max_coeff - min_coeff", max_coeff - min_coeff)
        for i, b in enumerate(betas):
            require_rate(f"betas[{i}]", b, below=1.0)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype=state_dtype)

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        b1, b2 = group["betas"]
        hyper = AdamHyper(
            float(group["lr"]),
            (float(b1), float(b2)),
            float(group["eps"]),
            float(group["weight_decay"]),
            True,
            group["bias_correction"],
        )
        return UpdateSpec(
            UpdateRule.LAMB_MOMENTS, lamb_coefficients(hyper, step, eps_inside_sqrt=group["eps_inside_sqrt"])
        )

    def step_bucket(self, group: dict[str, Any], spec: UpdateSpec, tensors: UpdateTensors) -> None:
        # Kernels see flat memory; for another memory order the reference does.
        flat = all(p.is_contiguous() for p in tensors.params)
        moments, apply = (lamb_moments, lamb_apply) if flat else (reference.lamb_moments, reference.lamb_apply)
        sums = moments(replace(spec, zero_grad=False), replace(tensors, copies=()))
        ratios = trust_ratios(sums, group["min_coeff"], group["max_coeff"])
        apply(replace(spec, rule=UpdateRule.LAMB_APPLY), tensors, ratios)


def trust_ratios(sums: Tensor, low: float, high: float) -> Tensor:
    """Compute [count] fp32 ratios from [count, 2] sums of squares of parameters and directions."""
    norms = sums.sqrt()
    ratios = (norms[:, 0] / norms[:, 1]).clamp(low, high)
    return torch.where((norms > 0).all(1), ratios, torch.ones_like(ratios)).float()
