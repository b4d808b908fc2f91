"""Which experts a token goes to: ds-moe's router, so that a model chooses the same experts in training and in inference."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from ds_inference.spec import ExpertsSpec
from ds_moe.selection import RouterOptions, Score, choose_experts, weigh

__all__ = ["route"]

_EPSILON = 1e-20  # in the sum of sigmoids that weights are divided by (DeepSeek-V3)


def route(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Select experts from router logits [T, count]: (weights, experts), each [T, chosen], fp32 and int64.

    Of equal scores the lowest expert is chosen. On the current stream; no device is read.
    """
    how = _options(spec)
    scores, experts = choose_experts(logits, how, correction)
    return weigh(scores, experts, how), experts


@cache
def _options(spec: ExpertsSpec) -> RouterOptions:
    score: Score = "softmax_of_chosen" if spec.score == "softmax_chosen" else spec.score
    return RouterOptions(
        spec.top_k,
        score,
        normalize=spec.normalized and spec.score != "softmax_chosen",
        scale=1.0 if spec.score == "softmax_chosen" else spec.scale,
        groups=spec.groups,
        limited_groups=spec.top_k_groups if spec.groups > 1 else 1,
        group_score="top2" if spec.group_score == "pair" else "max",
        epsilon=_EPSILON if spec.score == "sigmoid" else 0.0,
    )
