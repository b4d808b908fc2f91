"""What a router says: which experts each token goes to, with which weights. And what follows from capacity: who is dropped.

Words: T tokens, E experts, k *choices* a token. A choice is *dropped* when its expert is full or its token not used: it is not
*kept*, and its weight is 0. An expert's *capacity* is how many choices it takes at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_config.errors import PlanError

__all__ = ["RouterOutput", "bad_routing", "capacity_of", "positions", "probabilities", "wide"]


_NARROW = 16


@dataclass(frozen=True, slots=True, eq=False)
class RouterOutput:
    """The decision of a router about T tokens.

    Attributes:
        experts: int64 [T, k], best choice first; also of those that were dropped.
        weights: [T, k] fp32 with gradient; 0 where dropped.
        kept_mask: bool [T, k]: what was not dropped; None: everything.
        counts: int64 [E]: choices of each expert before any was dropped. No gradient, not read by the host.
        loss: Scalar with gradient: what keeps experts evenly loaded; 0 if the router has no such term.
        scores: [T, E] fp32: the probabilities that the weights were taken from, for metrics. Detached.
        capacity: Choices that an expert took at most; None without a limit.
        expert_choice: Experts chose tokens: every expert is a choice of every token, and `kept_mask` says which took it.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    loss: Tensor
    scores: Tensor
    kept_mask: Tensor | None = None
    capacity: int | None = None
    expert_choice: bool = False

    @property
    def num_experts(self) -> int:
        return self.counts.numel()

    @property
    def dropped(self) -> Tensor:
        """Scalar int64: choices that were dropped; tokens that no expert chose. Not read by the host."""
        if self.expert_choice and self.kept_mask is not None:
            return (~self.kept_mask.any(-1)).sum()
        return self.counts.new_zeros(()) if self.kept_mask is None else (~self.kept_mask).sum()


def capacity_of(tokens: int, experts: int, factor: float, minimum: int) -> int:
    """Return ceil(tokens / experts * factor), at least `minimum`.

    The product is rounded to fp32 before it is rounded up.
    """
    share = torch.tensor(factor, dtype=torch.float32, device="cpu") * (tokens / experts)
    return max(int(torch.ceil(share)), minimum)


def positions(experts: Tensor, num_experts: int, order: Tensor | None = None) -> Tensor:
    """Count, for each choice, how many choices of the same expert come before it.

    Args:
        experts: int64 [T, k], each in 0..num_experts; the last for those that do not count.
        order: int64 [T * k]: choices (token * k + choice) from first to last; None: in the order of their numbers.
    Returns: int64 [T, k].
    Cost: two sorts of T * k integers at most.
    """
    flat = experts.reshape(-1)
    ranked = flat if order is None else flat[order]
    by_expert = torch.sort(ranked, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(flat)
    place[by_expert] = torch.arange(flat.numel(), device=flat.device)
    place = place - starts[ranked]
    if order is None:
        return place.view(experts.shape)
    out = torch.empty_like(place)
    out[order] = place
    return out.view(experts.shape)


def probabilities(logits: Tensor) -> Tensor:
    """Compute the softmax of [T, E] over experts.

    A CPU's vectors lie along a row, and few experts do not fill one: then by columns, four times as fast.
    """
    if logits.device.type == "cpu" and logits.shape[-1] <= _NARROW:
        return logits.t().contiguous().softmax(0).t().contiguous()
    return logits.softmax(-1)


def bad_routing(message: str, fix: str) -> PlanError:
    """Build the error for a routing request that is not possible."""
    return PlanError(message, code="moe-routing", fix=fix)


def wide(x: Tensor) -> Tensor:
    """Convert `x` to at least fp32: routers decide in no less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
