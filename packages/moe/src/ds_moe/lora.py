"""Low-rank updates of packed experts (Hu et al. 2021): each expert has its own pair of small matrices.

Attaching sends nothing and reads no weight: shapes are known, and the first matrix of an expert is drawn from a stream of its own name, so it is
the same on every rank that holds the expert and does not depend on how experts are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_accel import derive_seed
from ds_comm import Box, ParamSharding, param_sharding, set_param_sharding
from ds_config.errors import PlanError
from ds_moe.dispatch import DispatchRows
from ds_moe.packed_experts import PackedExperts
from ds_ops.grouped import grouped_matmul

__all__ = ["ExpertLora", "attach_lora"]


class ExpertLora(nn.Module):
    """scale * x A_e^T B_e^T. `lora_A` [E, rank, in], `lora_B` [E, out, rank] of this rank's experts; B begins as zeros."""

    def __init__(self, shape: tuple[int, int, int], rank: int, scale: float) -> None:
        super().__init__()
        experts, inner, outer = shape
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inner))
        self.lora_B = nn.Parameter(torch.zeros(experts, outer, rank))

    def draw(self, name: str, first: int, seed: int) -> None:
        """Draw A as torch.nn.Linear draws its weight, each expert by its number among all."""
        bound = 1 / math.sqrt(self.lora_A.shape[2])
        for number, matrix in enumerate(self.lora_A.detach()):
            generator = torch.Generator().manual_seed(derive_seed(seed, name, first + number))
            matrix.copy_(torch.empty(matrix.shape, device="cpu").uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor, rows: DispatchRows) -> Tensor:
        """Apply the low-rank update of each row's expert: [N, in] to [N, out]."""
        low = grouped_matmul(x, self.lora_A.to(x.dtype), rows.ends, transpose=True)
        return grouped_matmul(low, self.lora_B.to(x.dtype), rows.ends, transpose=True) * self.scale


def attach_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float = 16.0,
    targets: Sequence[str] = ("gate_up_proj", "down_proj"),
    seed: int = 0,
) -> list[nn.Parameter]:
    """Freeze packed experts and add low-rank updates to them; after `apply_expert_parallel`, before ZeRO.

    Returns: The new parameters. The rest of the model is left as it is.

    Raises:
        PlanError: there are no packed experts with these weights ("moe-model").
    Cost: rank * (in + out) elements an expert and target; no communication.
    """
    new_params: list[nn.Parameter] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, PackedExperts):
            continue
        for target in (t for t in targets if t in dict(layer.named_parameters(recurse=False))):
            base = getattr(layer, target)
            wide = (base.shape[1], base.shape[2]) if layer.transposed else (base.shape[2], base.shape[1])
            extra = ExpertLora((base.shape[0], *wide), rank, alpha / rank).to(base.device)
            sharding = param_sharding(base)
            first = 0 if sharding.box is None else sharding.box.offset[0]
            extra.draw(f"{name}.{target}", first, seed)
            layer.lora[target] = extra
            for key, param in extra.named_parameters():
                whole = (layer.num_experts, *param.shape[1:])
                box = Box((first, 0, 0), tuple(param.shape))
                set_param_sharding(param, ParamSharding(sharding.family, f"{name}.lora.{target}.{key}", whole, box))
                param.allreduce = False  # type: ignore[attr-defined]
                param.group_name = getattr(base, "group_name", None)  # type: ignore[attr-defined]
                new_params.append(param)
        for param in layer.parameters(recurse=False):
            param.requires_grad_(False)
    if not new_params:
        raise PlanError(
            f"{type(model).__name__} has no packed experts with {tuple(targets)}",
            code="moe-model",
            fix="Call apply_expert_parallel(model, section) first (autoep_size 1 cuts nothing), and name weights of its experts.",
        )
    return new_params
