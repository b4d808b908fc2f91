"""Experts of inference and of training are chosen by one router: equal scores included, the lowest expert first."""

from __future__ import annotations

import pytest
import torch

from ds_inference.expert_routing import route
from ds_inference.spec import ExpertsSpec
from ds_moe import RouterOptions, select_experts

CASES = {
    "mixtral": (ExpertsSpec(8, 2, 4), RouterOptions(2, normalize=True)),
    "qwen": (ExpertsSpec(16, 4, 4, normalized=False), RouterOptions(4)),
    "gpt-oss": (ExpertsSpec(8, 4, 4, score="softmax_chosen"), RouterOptions(4, "softmax_of_chosen")),
    "deepseek-v2": (
        ExpertsSpec(16, 4, 4, normalized=False, scale=2.5, groups=4, top_k_groups=2),
        RouterOptions(4, scale=2.5, groups=4, limited_groups=2),
    ),
    "deepseek-v3": (
        ExpertsSpec(16, 4, 4, score="sigmoid", groups=4, top_k_groups=2, group_score="pair", score_bias=True),
        RouterOptions(4, "sigmoid", normalize=True, groups=4, limited_groups=2, group_score="top2", epsilon=1e-20),
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_the_same_experts_as_in_training(family: str) -> None:
    spec, how = CASES[family]
    # Four values only: most rows have equal scores, where torch.topk chooses as it likes.
    logits = torch.randint(0, 4, (200, spec.count), generator=torch.Generator().manual_seed(1)).float()
    bias = torch.linspace(0, 0.4, spec.count).round(decimals=1) if spec.score_bias else None
    weights, experts = route(logits, spec, bias)
    trained = select_experts(logits, how, bias)
    assert torch.equal(experts, trained.experts)
    assert torch.equal(weights, trained.weights)
    assert torch.equal(trained.counts, torch.bincount(experts.flatten(), minlength=spec.count))


@pytest.mark.parametrize("family", CASES)
def test_of_equal_scores_the_lowest_expert_is_chosen(family: str) -> None:
    spec, how = CASES[family]
    even = torch.zeros(3, spec.count)
    for experts in (route(even, spec, None)[1], select_experts(even, how).experts):
        assert experts.tolist() == [list(range(spec.top_k))] * 3
