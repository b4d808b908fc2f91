"""Blocks that compute with packed weights themselves: their experts are a module that only holds them. Here the block is replaced.

What a packed module of transformers 5 says of itself is known here by shapes: `gate_up_proj` [E, 2F, n] and `down_proj` [E, n, F], gate
before up. Before such a block is replaced, both are computed once: a block that does something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_config.errors import PlanError
from ds_moe.module_list_block import BlockParts
from ds_moe.packed_experts import PackedExperts
from ds_moe.router_output import wide
from ds_moe.selection import RouterOptions, select_experts

__all__ = ["HeldBlock", "held_experts"]

_TOKENS = 8


def held_experts(experts: nn.Module, router: nn.Module) -> int:
    """Return the number of experts whose packed weights `experts` only stores; 0 for any other kind of module."""
    weights = dict(experts.named_parameters())
    calls = type(experts).forward is not nn.Module.forward or hasattr(experts, "has_gate")
    if calls or set(weights) != {"gate_up_proj", "down_proj"}:
        return 0
    width = getattr(router, "weight", None)
    first, second = weights["gate_up_proj"], weights["down_proj"]
    if first.dim() != 3 or second.dim() != 3 or not isinstance(width, Tensor) or width.dim() != 2:
        return 0
    count, doubled, n = first.shape
    fits = doubled % 2 == 0 and second.shape == (count, n, doubled // 2) and width.shape == (count, n)
    return count if fits else 0


class _PackedExperts(nn.Module):
    """The experts' parameters, with what `PackedExperts` asks of a module of transformers 5."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, experts: nn.Module, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        for name, param in experts.named_parameters():
            self.register_parameter(name, param)
        self.act_fn = act_fn

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class HeldBlock(nn.Module):
    """Router and experts under the names of the block that it replaces.

    Args:
        original: The block.
        parts: What it consists of.
        rule: How its router chooses.

    Raises:
        PlanError: the block computes something else than its parts and `rule` say ("moe-model").
    """

    def __init__(self, original: nn.Module, parts: BlockParts, rule: RouterOptions) -> None:
        super().__init__()
        self.original, self.parts, self.rule, self.returns_logits = (original,), parts, rule, False
        experts = original.get_submodule(parts.experts)
        act_fn = getattr(experts, "act_fn", None) or getattr(original, "act_fn", None) or nn.functional.silu
        self.add_module(parts.router, original.get_submodule(parts.router))
        count = experts.get_parameter("down_proj").shape[0]
        rule.check(count)
        self.add_module(parts.experts, PackedExperts(_PackedExperts(experts, act_fn), count))
        self._compare(original)

    @property
    def packed(self) -> PackedExperts:
        """The experts."""
        return cast(PackedExperts, self.get_submodule(self.parts.experts))

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Route tokens to their experts, and return their combined outputs: [..., n] to [..., n]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.get_submodule(self.parts.router)(x)
        track = self.packed.track
        replayed = None if track is None else track.next_choices(x.shape[0])
        routed = select_experts(wide(logits), self.rule, experts=replayed)
        out = self.packed(x, routed.experts, routed.weights).reshape(hidden_states.shape)
        return (out, logits) if self.returns_logits else out

    def _compare(self, original: nn.Module) -> None:
        values = {name: param.detach() for name, param in original.named_parameters()}
        if any(value.is_meta for value in values.values()):
            return
        weight = self.get_submodule(self.parts.router).get_parameter("weight")
        draw = torch.Generator().manual_seed(0)  # the model's own draws are not disturbed
        x = torch.randn(1, _TOKENS, weight.shape[1], generator=draw, device="cpu").to(weight.device)
        exact = {name: value.float() for name, value in values.items()}
        with torch.no_grad():
            expected: Any = torch.func.functional_call(original, exact, (x,))
            self.returns_logits = isinstance(expected, tuple)
            expected = expected[0] if self.returns_logits else expected
            ours = torch.func.functional_call(self, exact, (x,))
            ours = ours[0] if self.returns_logits else ours
        self.packed.load.clear()
        if expected.shape != ours.shape or not torch.allclose(
            expected, ours, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        ):
            raise PlanError(
                f"{type(original).__name__} gives other values than a router with {self.rule} and gated experts",
                code="moe-model",
                fix="Set expert_parallel.top_k, score_func, route_norm and route_scale to what the block does, or leave it out of "
                "moe_layer_pattern.",
            )
