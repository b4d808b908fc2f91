"""Choosing the k best experts of each token: softmax or sigmoid scores, corrected by a bias, limited to groups of experts.

`RouterOptions` says how, as data; `select_experts` does it. It is the rule of Mixtral, Qwen-MoE, OLMoE, DeepSeek-V2 and V3 and GPT-OSS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_config.option_checks import check_options
from ds_moe.router_output import RouterOutput, bad_routing, probabilities, wide

__all__ = ["GroupScore", "RouterOptions", "Score", "choose_experts", "select_experts", "weigh"]

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How experts are chosen and weighed.

    Attributes:
        k: Choices a token.
        score: What logits become: their softmax over all experts, the sigmoid of each, or the softmax of the k chosen logits.
        normalize: Divide the k weights of a token by their sum.
        scale: The weights times this, last.
        groups: Experts are in so many groups of neighbours, of which only the best count.
        limited_groups: How many groups that are.
        group_score: What a group is worth: its best expert's score (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
        epsilon: Added to the sum before dividing by it.
    """

    k: int
    score: Score = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    limited_groups: int = 1
    group_score: GroupScore = "max"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_options(self, epsilon=">= 0")
        if self.k < 1 or not 1 <= self.limited_groups <= self.groups:
            raise bad_routing(
                f"{self.k} choices out of {self.limited_groups} of {self.groups} groups",
                "Choose at least one expert, and at least one and at most all of the groups.",
            )

    def check(self, experts: int) -> None:
        """Whether it fits a number of experts.

        Raises:
            PlanError: more choices than experts that count, or groups that do not divide them ("moe-routing").
        """
        reach = experts // self.groups * self.limited_groups
        if experts % self.groups or self.k > reach:
            raise bad_routing(
                f"{self.k} choices of {experts} experts, {self.limited_groups} of {self.groups} groups of which count",
                "Let the groups divide the experts, and choose at most as many as the counting groups have.",
            )


def select_experts(
    logits: Tensor, how: RouterOptions, bias: Tensor | None = None, *, experts: Tensor | None = None
) -> RouterOutput:
    """Choose experts by score and bias; weigh them by score alone. Of equal scores the lowest expert is chosen.

    Args:
        logits: floats [T, E]. NaN goes through: the token's weights are NaN, its experts are valid numbers.
        bias: floats [E], added for the choice only (Wang et al. 2024).
        experts: int64 [T, k]: these were chosen before (`ds_moe.replay_routing`); only weights are computed.

    Raises:
        PlanError: `how` does not fit E, or logits are not a matrix ("moe-routing").
    Cost: the scores and a sort of [T, E]; no device is read.
    """
    ranked, experts = choose_experts(logits, how, bias, experts=experts)
    scores = probabilities(ranked) if how.score == "softmax_of_chosen" else ranked
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, experts.reshape(-1), torch.ones_like(experts.reshape(-1)))
    zero = scores.new_zeros(())
    return RouterOutput(experts, weigh(ranked, experts, how), counts, zero, scores.detach())


def choose_experts(
    logits: Tensor, how: RouterOptions, bias: Tensor | None = None, *, experts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what experts are ranked by, [T, E] in at least fp32 for `weigh`, and the chosen experts, int64 [T, k], best first.

    Arguments, errors and cost are those of `select_experts`, which adds what training needs.
    """
    if logits.dim() != 2:
        raise bad_routing(f"logits of shape {tuple(logits.shape)}", "Give logits [tokens, experts].")
    how.check(logits.shape[1])
    raw = wide(logits)
    ranked = (
        raw if how.score == "softmax_of_chosen" else raw.sigmoid() if how.score == "sigmoid" else probabilities(raw)
    )
    return ranked, _choose(ranked.detach(), how, bias) if experts is None else experts


def weigh(scores: Tensor, experts: Tensor, how: RouterOptions) -> Tensor:
    """Compute the weights [T, k] of the chosen experts.

    `scores` are logits if the rule is the softmax of the chosen.
    """
    weights = scores.gather(-1, experts)
    if how.score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if how.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + how.epsilon)
    return weights if how.scale == 1.0 else weights * how.scale


def _choose(scores: Tensor, how: RouterOptions, bias: Tensor | None) -> Tensor:
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if how.limited_groups < how.groups:
        grouped = scores.unflatten(-1, (how.groups, -1))
        if how.group_score == "max":
            worth = grouped.amax(-1)
        else:
            worth = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        best = _best(worth, how.limited_groups)
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
        scores = grouped.masked_fill(out[..., None], float("-inf")).flatten(-2)
    return _best(scores, how.k)


def _best(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row, best first.

    torch.topk does not define which of equal values it returns; a stable sort does.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
