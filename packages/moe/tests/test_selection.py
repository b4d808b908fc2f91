"""Selections against their definition, one token at a time; losses and balancing against their formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_moe import RouterOptions, capacity_of, jitter, load_balancing_loss, select_experts, update_expert_bias, z_loss
from ds_moe.balancing_losses import entropy
from ds_moe.moe_families import FAMILIES, PRESETS
from ds_moe.noise import NoiseStream

RULES = [
    RouterOptions(2, normalize=True),
    RouterOptions(3),
    RouterOptions(2, "softmax_of_chosen"),
    RouterOptions(
        2, "sigmoid", normalize=True, scale=2.5, groups=4, limited_groups=2, group_score="top2", epsilon=1e-20
    ),
    RouterOptions(3, scale=16.0, groups=2, limited_groups=1),
    RouterOptions(1, "sigmoid"),
]


def one_token(logits: list[float], how: RouterOptions, bias: list[float]) -> tuple[list[int], list[float]]:
    count = len(logits)
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    if how.score == "softmax":
        scores = [math.exp(v) / sum(map(math.exp, logits)) for v in logits]
    ranked = [(logits if how.score == "softmax_of_chosen" else scores)[e] + bias[e] for e in range(count)]
    size = count // how.groups
    groups = [range(g * size, (g + 1) * size) for g in range(how.groups)]

    def worth(group: range) -> float:
        best = sorted((ranked[e] for e in group), reverse=True)
        return best[0] if how.group_score == "max" else sum(best[:2])

    allowed = [e for g in sorted(groups, key=worth, reverse=True)[: how.limited_groups] for e in g]
    chosen = sorted(allowed, key=lambda e: (-ranked[e], e))[: how.k]
    weights = [scores[e] for e in chosen]
    if how.score == "softmax_of_chosen":
        weights = [math.exp(logits[e]) / sum(math.exp(logits[i]) for i in chosen) for e in chosen]
    if how.normalize:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * how.scale for w in weights]


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_selection_is_its_definition(how: RouterOptions, biased: bool) -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 8, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64) * 0.3 if biased else torch.zeros(8, dtype=torch.float64)
    routed = select_experts(logits, how, bias)
    for token in range(40):
        chosen, weights = one_token(logits[token].tolist(), how, bias.tolist())
        assert routed.experts[token].tolist() == chosen
        torch.testing.assert_close(routed.weights[token].tolist(), weights, atol=1e-12, rtol=1e-12)
    assert torch.equal(routed.counts, torch.bincount(routed.experts.flatten(), minlength=8))


@pytest.mark.parametrize("how", RULES)
def test_weights_have_the_gradient_of_the_formula(how: RouterOptions) -> None:
    torch.manual_seed(4)
    logits = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: select_experts(x, how).weights, logits)


def test_chosen_before_means_only_weights_are_computed() -> None:
    logits = torch.randn(10, 8)
    first = select_experts(logits, RULES[0])
    again = select_experts(logits + 0.01 * torch.randn(10, 8), RULES[0], experts=first.experts)
    assert torch.equal(first.experts, again.experts)
    assert not torch.equal(first.weights, again.weights)


def test_equal_scores_take_the_lowest_expert() -> None:
    assert select_experts(torch.zeros(2, 6), RouterOptions(3)).experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RouterOptions(0),
        lambda: RouterOptions(1, groups=2, limited_groups=3),
        lambda: select_experts(torch.zeros(2, 6), RouterOptions(4, groups=2)),
        lambda: select_experts(torch.zeros(2, 6), RouterOptions(1, groups=4)),
        lambda: select_experts(torch.zeros(6), RouterOptions(1)),
    ],
)
def test_what_cannot_be_is_said(wrong: object) -> None:
    with pytest.raises(PlanError, match="moe-routing"):
        wrong()  # type: ignore[operator]


def test_losses() -> None:
    torch.manual_seed(5)
    logits = torch.randn(9, 4, dtype=torch.float64)
    scores = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(scores.argmax(-1), 4)
    me, ce = scores.sum(0) / 9, chosen.sum(0) / 9
    torch.testing.assert_close(load_balancing_loss(scores, chosen), 4 * (me * ce).sum())
    torch.testing.assert_close(z_loss(logits), (logits.exp().sum(-1).log() ** 2).sum() / 9)
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even, torch.ones(8, 4), 4) == pytest.approx(1.0)
    empty = torch.empty(0, 4, requires_grad=True)
    (z_loss(empty) + load_balancing_loss(empty, empty)).backward()
    assert empty.grad is not None


def test_balancing_moves_the_bias_against_the_load() -> None:
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([10, 2, 5, 3]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.1]))

    def load(bias: Tensor) -> Tensor:
        return select_experts(logits, RouterOptions(2, "sigmoid"), bias).counts

    torch.manual_seed(0)
    logits = torch.randn(512, 4) + torch.tensor([2.0, 0.0, 0.0, -2.0])
    bias = torch.zeros(4)
    before = load(bias)
    for _ in range(200):
        update_expert_bias(bias, load(bias), 0.01)
    assert load(bias).max() < 300 < before.max()


def test_entropy_capacity_and_jitter() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(entropy(counts), torch.tensor([1.0, 0.0, 0.0]))
    assert entropy(torch.tensor([7])) == 1
    assert capacity_of(10, 4, 1.0, 1) == 3
    assert capacity_of(10, 4, 1.0, 4) == 4
    assert capacity_of(0, 4, 1.0, 4) == 4
    noisy = jitter(torch.ones(1000), NoiseStream("j", torch.Generator().manual_seed(0)))
    assert 0.99 <= noisy.min() < 0.992
    assert 1.008 < noisy.max() <= 1.01


@pytest.mark.parametrize(
    ("preset", "router"),
    [("qwen3_5_moe", "qwen3_5_moe.Qwen3_5MoeTopKRouter"), ("minimax_m3", "minimax_m3_vl.MiniMaxM3VLTopKRouter")],
)
def test_a_preset_named_otherwise_than_its_type_routes_as_the_family_does(preset, router):
    module, _, name = router.partition(".")
    code = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    config = SimpleNamespace(num_experts_per_tok=2, num_experts=8, num_local_experts=8, hidden_size=6)
    own = getattr(code, name)(config)
    torch.nn.init.normal_(own.weight)
    logits, weights, experts = own(torch.randn(16, 6))
    routed = select_experts(logits, FAMILIES[PRESETS[preset]].selection(config))
    dense = torch.zeros(16, 8)
    torch.testing.assert_close(
        dense.scatter(1, routed.experts, routed.weights), dense.scatter(1, experts, weights), atol=1e-6, rtol=1e-5
    )
