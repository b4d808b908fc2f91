"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms")."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ds_ops.optim.optimizer_base import OpsOptimizer, Params, require_rate
from ds_ops.optim.step_options import StepOptions
from ds_ops.update_rules import UpdateRule, UpdateSpec, lion_coefficients

__all__ = ["Lion"]


class Lion(OpsOptimizer):
    """p = p (1 - lr wd) - lr sign(b1 m + (1-b1) g);  m = b2 m + (1-b2) g, with sign(0) = 0.

    Cost: one pass, 20 bytes an element with fp32 everything. State: 4 bytes an element. Use a 3 to 10 times smaller
    learning rate than for AdamW.
    """

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        require_rate("lr", lr)
        require_rate("weight_decay", weight_decay)
        for i, b in enumerate(betas):
            require_rate(f"betas[{i}]", b, below=1.0)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state_dtype=state_dtype, options=options)

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        b1, b2 = group["betas"]
        return UpdateSpec(
            UpdateRule.LION, lion_coefficients(float(group["lr"]), (b1, b2), float(group["weight_decay"]))
        )
