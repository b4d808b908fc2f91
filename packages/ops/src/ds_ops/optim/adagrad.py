"""Adagrad (Duchi et al. 2011), as torch.optim.Adagrad defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ds_ops.optim.optimizer_base import OpsOptimizer, Params, require_rate
from ds_ops.optim.step_options import StepOptions
from ds_ops.update_rules import UpdateRule, UpdateSpec, adagrad_coefficients

__all__ = ["Adagrad"]


class Adagrad(OpsOptimizer):
    """g = g + wd p;  s = s + g^2;  p = p - lr/(1 + (t-1) lr_decay) g / (sqrt(s) + eps).

    Weight decay enters the numerator too, and gradients are left alone. Cost: one pass, 20 bytes an element with fp32
    everything. State: 4 bytes an element.
    """

    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        for name, value in defaults.items():
            require_rate(name, value)
        super().__init__(params, defaults | {"maximize": maximize}, state_dtype=state_dtype, options=options)

    def ensure_state(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[Tensor]:
        fresh = super().ensure_state(group, params)
        for p in fresh:
            self.state[p]["sum"].fill_(group["initial_accumulator_value"])
        return fresh

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return UpdateSpec(
            UpdateRule.ADAGRAD, adagrad_coefficients(lr, float(group["eps"]), float(group["weight_decay"]))
        )
