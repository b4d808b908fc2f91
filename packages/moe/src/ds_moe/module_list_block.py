"""Blocks of the older kind: a linear router, a list of expert modules, perhaps experts for all tokens. Here they run over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ds_comm import ParamSharding, set_param_sharding
from ds_config.errors import PlanError
from ds_moe.dispatch import DispatchRows, WithShared
from ds_moe.expert_groups import ExpertGroups, alone
from ds_moe.experts import each
from ds_moe.load import ExpertLoad
from ds_moe.moe_layer import RoutingOptions, route_through
from ds_moe.router_output import wide
from ds_moe.router_replay import _Track
from ds_moe.selection import RouterOptions, select_experts

__all__ = ["BlockParts", "ListedBlock"]


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Names of what a block consists of.

    Attributes:
        router: A linear [experts, width].
        experts: A ModuleList.
        shared: Experts for all tokens; None if there are none.
        shared_gate: A linear [1, width] whose sigmoid weighs them.
    """

    router: str
    experts: str
    shared: str | None = None
    shared_gate: str | None = None


class ListedBlock(nn.Module):
    """A block of which each rank has some experts. Modules and names are those of the block that it replaces.

    Args:
        original: The block.
        parts: What it consists of.
        rule: How its router chooses.
        returns_logits: Whether it returns (output, router logits [T, E]), or the output alone.
    """

    def __init__(self, original: nn.Module, parts: BlockParts, rule: RouterOptions, returns_logits: bool) -> None:
        super().__init__()
        self.original, self.parts, self.rule, self.returns_logits = (original,), parts, rule, returns_logits
        for name in (parts.router, parts.experts, parts.shared, parts.shared_gate):
            if name is not None:
                self.add_module(name, original.get_submodule(name))
        self.num_experts, self.ep_size = len(list(self.get_submodule(parts.experts).children())), 1
        rule.check(self.num_experts)
        router = self.get_submodule(parts.router)
        weight = getattr(router, "weight", None)
        if not isinstance(weight, Tensor) or weight.shape[0] != self.num_experts:
            raise PlanError(
                f"router {parts.router!r} has a weight of shape {None if weight is None else tuple(weight.shape)} "
                f"for {self.num_experts} experts",
                code="moe-model",
                fix="Name the block's router in expert_parallel.router_pattern.",
            )
        self.places: ExpertGroups | None = alone()
        self.how = RoutingOptions()
        self.load = ExpertLoad()
        self.track: _Track | None = None

    def settle(self, places: ExpertGroups, name: str) -> None:
        """Keep this rank's experts only. No communication."""
        local_experts = places.local(self.num_experts)
        everyone = list(self.get_submodule(self.parts.experts).children())
        experts = everyone[local_experts.start : local_experts.stop]
        for other in everyone[: local_experts.start] + everyone[local_experts.stop :]:
            for param in other.parameters():
                param.data = param.new_empty(0)  # the block that was replaced keeps the module, not the memory
        self.add_module(self.parts.experts, nn.ModuleList(experts))
        family = places.family if places.holders.size * places.expert.size > 1 else None
        for number, expert in zip(local_experts, experts, strict=True):
            for rest, param in expert.named_parameters():
                set_param_sharding(
                    param, ParamSharding(family, f"{name}.{self.parts.experts}.{number}.{rest}".lstrip("."))
                )
                param.allreduce = False  # type: ignore[attr-defined]
                param.group_name = f"ep_size_{places.expert.size}"  # type: ignore[attr-defined]
        self.places, self.ep_size = places, places.expert.size

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Route tokens to their experts, and return their combined outputs: [..., n] to [..., n]."""
        if self.places is None:
            raise PlanError("these experts were undone", code="moe-places", fix="Build the engine again.")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        router = self.get_submodule(self.parts.router)
        weight, bias = cast(Tensor, router.weight), cast(Tensor | None, getattr(router, "bias", None))
        logits = nn.functional.linear(wide(x), wide(weight), None if bias is None else wide(bias))
        correction = getattr(router, "e_score_correction_bias", None)
        replayed = None if self.track is None else self.track.next_choices(x.shape[0])
        routed = select_experts(logits, self.rule, correction, experts=replayed)
        if self.track is not None:
            self.track.took(routed.experts)
        self.load.note(routed)
        if self.parts.shared is None:
            out = route_through(x, routed, self._compute, self.places, self.how).to(x.dtype)
        else:
            compute = WithShared(self._compute, lambda: self._shared(x))
            out = route_through(x, routed, compute, self.places, self.how).to(x.dtype) + compute.shared_output()
        out = out.reshape(hidden_states.shape)
        return (out, logits.to(x.dtype)) if self.returns_logits else out

    def _shared(self, x: Tensor) -> Tensor:
        """Compute the experts for all tokens, weighed by their gate."""
        out: Tensor = self.get_submodule(cast(str, self.parts.shared))(x)
        if self.parts.shared_gate is None:
            return out
        return torch.sigmoid(self.get_submodule(self.parts.shared_gate)(x)) * out

    def _compute(self, x: Tensor, rows: DispatchRows) -> Tensor:
        return each(self.get_submodule(self.parts.experts).children(), x, rows)
