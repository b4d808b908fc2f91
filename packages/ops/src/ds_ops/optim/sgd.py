"""Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ds_config.errors import ConfigError
from ds_ops.optim.optimizer_base import OpsOptimizer, Params, require_rate
from ds_ops.optim.step_options import StepOptions
from ds_ops.update_rules import UpdateRule, UpdateSpec, sgd_coefficients, sgd_plain_coefficients

__all__ = ["SGD"]


class SGD(OpsOptimizer):
    """g = g + wd p;  m = mu m + (1-damp) g (first step: m = g);  p = p - lr m, or lr (g + mu m) with Nesterov.

    Cost: one pass, 20 bytes an element with momentum and fp32 everything, 12 without. State: 4 bytes an
    element, or none.
    """

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        require_rate("lr", lr)
        require_rate("momentum", momentum)
        require_rate("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov=True needs momentum > 0 and dampening = 0; found {momentum} and {dampening}.",
                code="optimizer-value",
                fix="Set momentum=0.9, dampening=0.",
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, options=options)

    def states_of(self, group: dict[str, Any], p: Tensor) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        lr, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
        if not momentum:
            return UpdateSpec(UpdateRule.SGD_PLAIN, sgd_plain_coefficients(lr, decay))
        # The buffer starts as zeros, so taking the first gradient whole is dampening 0.
        dampening = 0.0 if step == 1 else float(group["dampening"])
        c = sgd_coefficients(lr, momentum, dampening, decay)
        return UpdateSpec(UpdateRule.SGD, (*c[:4], 1.0 if group["nesterov"] else 0.0, c[5]))
