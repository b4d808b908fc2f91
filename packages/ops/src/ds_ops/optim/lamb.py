"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ops.apply_update import lamb_apply, lamb_moments
from ds_ops.optim.optimizer_base import (
    NO_FUSION,
    FusedOps,
    OpsOptimizer,
    Params,
    _is_dtensor,
    _like,
    _local,
    _local_grad,
    fused_spec,
    require_rate,
)
from ds_ops.reference import update as reference
from ds_ops.update_rules import AdamHyper, UpdateRule, UpdateSpec, UpdateTensors, lamb_coefficients

__all__ = ["Lamb"]


class Lamb(OpsOptimizer):
    """u = m/(1-b1^t) / (sqrt(v)/sqrt(1-b2^t) + eps) + wd p;  p = p - lr clamp(|p|/|u|, min_coeff, max_coeff) u.

    The ratio of norms is per tensor, and 1 where either norm is 0, so tensors must be stepped whole: `elementwise` is
    False. Of a DTensor each rank steps its elements, and the squares are summed over the ranks: one all-reduce a step and mesh. With `eps_inside_sqrt` the denominator is sqrt(v/(1-b2^t) + eps).

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

    def needs_whole(self, group: dict[str, Any], p: Tensor) -> bool:
        return not _is_dtensor(p)

    def step_group(self, group: dict[str, Any], fusion: FusedOps = NO_FUSION) -> None:
        plain = [p for p in group["params"] if not _is_dtensor(p)]
        meshes: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in group["params"]:
            if _is_dtensor(p) and fusion.grad_of(p) is not None:
                part: Any = p
                meshes.setdefault((part.device_mesh, part.placements), []).append(p)
        if not meshes:
            super().step_group(group, fusion)
            return
        super().step_group({**group, "params": plain}, fusion)
        for (mesh, placements), params in meshes.items():
            cut = [mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
            self._step_parts(group, params, fusion, cut)

    def _step_parts(self, group: dict[str, Any], params: list[Tensor], fusion: FusedOps, cut: list[Any]) -> None:
        """Step this rank's elements of DTensors of one layout; `cut` are the process groups over which their elements are spread."""
        self.ensure_state(group, params)
        calls: list[tuple[UpdateSpec, UpdateTensors] | None] = []
        sums = torch.zeros(len(params), 2, dtype=torch.float64, device=params[0].device)
        for index, p in enumerate(params):
            state, local = self.state[p], _local(p)
            number = int(state["step"]) + 1
            grad = _like(local, _local_grad(p, self.dense_grad(p, fusion)))
            tensors = UpdateTensors([local], [grad], tuple([_local(state[name])] for name in self.state_names))
            spec = fused_spec(self.spec(group, number), group, fusion, number)
            calls.append((spec, tensors) if local.numel() else None)
            if local.numel():
                moments = lamb_moments if local.is_contiguous() else reference.lamb_moments
                sums[index] = moments(replace(spec, zero_grad=False), tensors)[0]
        for ranks in cut:
            dist.all_reduce(sums, group=ranks)
        ratios = trust_ratios(sums, group["min_coeff"], group["max_coeff"])
        for p, call, ratio in zip(params, calls, ratios, strict=True):
            if call is not None:
                spec, tensors = call
                apply = lamb_apply if tensors.params[0].is_contiguous() else reference.lamb_apply
                apply(replace(spec, rule=UpdateRule.LAMB_APPLY), tensors, ratio.reshape(1))
            self.state[p]["step"] += 1
            if p in fusion.copies:
                fusion.copies[p].copy_(p)

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
