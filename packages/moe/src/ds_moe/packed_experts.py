"""Packed experts of transformers 5, cut over ranks: the same parameters under the same names, with fewer experts in each.

The module that a block calls with (tokens, chosen experts, weights) is replaced by one with this signature. Its parameters are the very same
objects, narrowed to the experts of this rank, so that optimizers that were built before still know them. What lies between the two
products (activation, clamps, a norm) is asked of the module that was replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_comm import Box, ParamSharding, all_gather, param_sharding, set_param_sharding
from ds_config.errors import PlanError, UnsupportedError
from ds_moe.dispatch import DispatchRows
from ds_moe.expert_groups import ExpertGroups, alone
from ds_moe.load import ExpertLoad
from ds_moe.moe_layer import RoutingOptions, route_through
from ds_moe.router_output import RouterOutput
from ds_moe.router_replay import _Track
from ds_ops.grouped import grouped_matmul

__all__ = ["PackedExperts"]

_NEEDED = ("has_gate", "has_bias", "is_transposed")


class PackedExperts(nn.Module):
    """Experts whose weights are packed: [E, ...] each.

    Args:
        original: What they are taken from; it stays as it is until `settle`, and is asked what lies between the products.
        num_experts: Experts on all ranks.

    Raises:
        PlanError: a parameter is not packed by experts ("moe-model").
    """

    def __init__(self, original: nn.Module, num_experts: int) -> None:
        super().__init__()
        missing = [name for name in _NEEDED if not hasattr(original, name)]
        wrong = [
            name for name, p in original.named_parameters(recurse=False) if p.dim() < 2 or p.shape[0] != num_experts
        ]
        names = {name for name, _ in original.named_parameters(recurse=False)}
        if missing or wrong or "down_proj" not in names:
            raise PlanError(
                f"{type(original).__name__}: without {missing} and with parameters {wrong or sorted(names)}, it is not "
                f"{num_experts} packed experts",
                code="moe-model",
                fix="Leave this block out of moe_layer_pattern, or give its experts the attributes of transformers 5.",
            )
        self.original = (original,)  # in a tuple: its parameters are ours, and must not be found twice
        for name, param in original.named_parameters(recurse=False):
            self.register_parameter(name, param)
            if param.dim() > 2:
                param.muon_matrices = "stack"  # type: ignore[attr-defined]  # Muon asks: [E, out, in] is no convolution
        for name, child in original.named_children():
            if any(True for _ in child.parameters()):
                raise UnsupportedError(
                    f"{type(original).__name__} has parameters of its own in {name!r}, besides the packed ones",
                    code="moe-model",
                    fix="Leave this block out of moe_layer_pattern.",
                )
        self.num_experts, self.ep_size = num_experts, 1
        self.places: ExpertGroups | None = alone()
        self.how = RoutingOptions()
        self.load = ExpertLoad()
        self.track: _Track | None = None
        self.lora: nn.ModuleDict = nn.ModuleDict()

    @property
    def transposed(self) -> bool:
        """Whether weights are [E, in, out]; torch's linears have [out, in]."""
        return bool(self.original[0].is_transposed)

    def settle(self, places: ExpertGroups, name: str) -> None:
        """Keep this rank's experts only. No communication: every rank has all of them, or none has values yet (meta)."""
        local_experts = places.local(self.num_experts)
        for key, param in self.named_parameters(recurse=False):
            whole = tuple(param.shape)
            box = Box((local_experts.start, *[0] * (len(whole) - 1)), (len(local_experts), *whole[1:]))
            part = param.detach()[local_experts.start : local_experts.stop]
            param.data = part.clone() if places.expert.size > 1 else part
            family = places.family if places.holders.size * places.expert.size > 1 else None
            logical = param_sharding(param).name or f"{name}.{key}".lstrip(".")  # a stage knows it by another name
            set_param_sharding(param, ParamSharding(family, logical, whole, box))
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = f"ep_size_{places.expert.size}"  # type: ignore[attr-defined]
        self.places, self.ep_size = places, places.expert.size

    def whole(self) -> dict[str, Tensor]:
        """Gather all experts to every rank, by the parameters' names. Collective over the expert group."""
        places = self.places or alone()
        return {name: gather_experts(param, places) for name, param in self.named_parameters(recurse=False)}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of the chosen experts [T, k]: [T, n] to [T, n]."""
        if self.places is None:
            raise PlanError("these experts were undone", code="moe-places", fix="Build the engine again.")
        experts = top_k_index.long()
        if self.track is not None:
            self.track.took(experts)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, experts.reshape(-1), torch.ones_like(experts.reshape(-1)))
        self.load.add(counts)
        none = top_k_weights.new_zeros(())
        routed = RouterOutput(experts, top_k_weights, counts, none, top_k_weights.detach())
        out = route_through(hidden_states, routed, self._compute, self.places, self.how)
        return out.to(hidden_states.dtype)

    def _compute(self, x: Tensor, rows: DispatchRows) -> Tensor:
        original: Any = self.original[0]
        first = "gate_up_proj" if original.has_gate else "up_proj"
        wanted = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        x = x.to(wanted or getattr(self, first).dtype)
        y = self._product(first, x, rows)
        y = original._apply_gate(y) if original.has_gate else original.act_fn(y)
        y = self._product("down_proj", y, rows)
        return original.post_expert_norm(y) if getattr(original, "has_post_expert_norm", False) else y

    def _product(self, name: str, x: Tensor, rows: DispatchRows) -> Tensor:
        original: Any = self.original[0]
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if original.has_bias else None
        bias = None if bias is None else bias.to(x.dtype)
        y = grouped_matmul(x, weight.to(x.dtype), rows.ends, transpose=not self.transposed, bias=bias)
        return y + self.lora[name](x, rows) if name in self.lora else y


def gather_experts(param: Tensor, places: ExpertGroups) -> Tensor:
    """Gather a parameter [E, ...] from the shards [E / ranks, ...] of all ranks. Collective over the expert group."""
    if places.expert.size == 1:
        return param.detach()
    shard = param.detach().contiguous()
    parts = [torch.empty_like(shard) for _ in range(places.expert.size)]
    all_gather(parts, shard, group=places.expert, unit="experts")
    return torch.cat(parts)
