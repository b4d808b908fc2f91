"""Adam and AdamW, on CPU and CUDA alike: what other libraries call CPUAdam and FusedAdam is one class here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ds_config.errors import UnsupportedError
from ds_ops.apply_update import update
from ds_ops.optim.optimizer_base import NO_FUSION, FusedOps, OpsOptimizer, Params, require_rate
from ds_ops.optim.step_options import StepOptions
from ds_ops.update_rules import (
    AdamHyper,
    UpdateRule,
    UpdateSpec,
    UpdateTensors,
    adam_coefficients,
    adam_undo_coefficients,
)

__all__ = ["Adam", "AdamW"]


class AdamW(OpsOptimizer):
    """AdamW (Loshchilov and Hutter 2019): decay shrinks the parameter, not the gradient.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p = p (1 - lr wd) - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps).
    With `amsgrad` (Reddi et al. 2018) the largest v so far takes the place of v: a third state, and torch's foreach operations for a kernel.

    Cost: one pass, 28 bytes an element with fp32 everything. State: 8 bytes an element (4 with 16-bit states).
    `options`: see `StepOptions`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        bias_correction: bool = True,
        state_dtype: torch.dtype = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        require_rate("lr", lr)
        require_rate("eps", eps)
        require_rate("weight_decay", weight_decay)
        for i, b in enumerate(betas):
            require_rate(f"betas[{i}]", b, below=1.0)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, state_dtype=state_dtype, options=options)

    def _hyper(self, group: dict[str, Any]) -> AdamHyper:
        b1, b2 = group["betas"]
        return AdamHyper(
            float(group["lr"]),
            (float(b1), float(b2)),
            float(group["eps"]),
            float(group["weight_decay"]),
            group.get("decoupled_weight_decay", self.decoupled),
            group.get("bias_correction", True),
        )

    def states_of(self, group: dict[str, Any], p: Tensor) -> tuple[str, ...]:
        return (*self.state_names, "max_exp_avg_sq") if group.get("amsgrad") else self.state_names

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        rule = UpdateRule.AMSGRAD if group.get("amsgrad") else UpdateRule.ADAM
        return UpdateSpec(rule, adam_coefficients(self._hyper(group), step))

    @torch.no_grad()
    def undo(self, params: Sequence[Tensor] | None = None, *, fusion: FusedOps = NO_FUSION) -> None:
        """Take the last step of `params` (default: all with a gradient) back, from the same gradients.

        For speculative stepping: step while the global norm is still being computed, undo if it forbids the step.
        Accurate to rounding (about 1e-6 relative), not to the bit. Only with decoupled decay, and without `zero_grads`.
        """
        for group in self.param_groups:
            hyper = self._hyper(group)
            if not hyper.decoupled and hyper.weight_decay:
                raise UnsupportedError(
                    "undo() needs decoupled weight decay: L2 decay mixes the old parameter into both moments.",
                    code="optimizer-undo",
                    fix="Use AdamW.",
                )
            if group.get("amsgrad"):
                raise UnsupportedError(
                    "undo() needs what a step overwrites, and the largest second moment so far is lost with amsgrad=True.",
                    code="optimizer-undo",
                    fix="Leave amsgrad out.",
                )
            chosen = [p for p in group["params"] if params is None or any(p is q for q in params)]
            self._undo_group(group, [p for p in chosen if self.state[p].get("step", 0) > 0], fusion)

    def _undo_group(self, group: dict[str, Any], params: Sequence[Tensor], fusion: FusedOps) -> None:
        sign = -1.0 if group.get("maximize") else 1.0
        for p in params:
            state, grad = self.state[p], fusion.grad_of(p)
            if grad is None:
                continue
            coefficients = adam_undo_coefficients(self._hyper(group), state["step"])
            spec = UpdateSpec(UpdateRule.ADAM_UNDO, coefficients, sign * fusion.grad_scale)
            copies = [fusion.copies[p]] if p in fusion.copies else []
            update(spec, UpdateTensors([p.detach()], [grad], ([state["exp_avg"]], [state["exp_avg_sq"]]), copies))
            state["step"] -= 1


class Adam(AdamW):
    """Adam (Kingma and Ba 2015); weight decay, if any, is L2: added to the gradient as wd * p."""

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)
