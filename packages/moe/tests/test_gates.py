"""The gates against DeepSpeed's formulas, written out token by token, on drawn logits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_moe import GateRule, NoiseStream, TopKGate, capacity_of, gate, top1gating, top2gating, topkgating

SHAPES = [(16, 4), (33, 8), (64, 5), (7, 3), (4, 4)]


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    terms = [math.exp(v - top) for v in row]
    return [t / sum(terms) for t in terms]


def capacity(tokens: int, experts: int, factor: float, minimum: int) -> int:
    return max(math.ceil(tokens / experts * factor), minimum)


def dense(kept: list[tuple[int, int, int, float]], tokens: int, experts: int, width: int) -> Tensor:
    out = torch.zeros(tokens, experts, width, dtype=torch.float64)
    for token, expert, place, weight in kept:
        out[token, expert, place] = weight
    return out


def loss_of(p: list[list[float]], chosen: list[tuple[int, ...]], experts: int, k: int) -> float:
    tokens = len(p)
    me = [sum(row[e] for row in p) / tokens for e in range(experts)]
    ce = [sum(e in c for c in chosen) / tokens for e in range(experts)]
    return sum(a * b for a, b in zip(me, ce, strict=True)) * experts / k


def logits_of(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(("tokens", "experts"), SHAPES)
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("used", [False, True])
def test_top1_keeps_the_tokens_that_topk_finds(tokens: int, experts: int, factor: float, used: bool) -> None:
    logits = logits_of(tokens, experts, 1)
    mask = (torch.arange(tokens) % 3 != 0).float() if used else None
    p = [softmax(row) for row in logits.tolist()]
    best = [row.index(max(row)) for row in p]
    counted = [t for t in range(tokens) if mask is None or mask[t]]
    width = capacity(tokens, experts, factor, 2)
    asking = torch.zeros(tokens, experts, dtype=torch.int64)
    for t in counted:
        asking[t, best[t]] = 1
    found = torch.topk(asking, min(width, tokens), dim=0)[1]  # DeepSpeed's call: which of equal ones is torch's choice
    places = (asking * torch.zeros_like(asking).scatter_(0, found, 1)).cumsum(0)
    seen = asking.sum(0).tolist()
    kept = [(t, best[t], int(places[t, best[t]]) - 1, p[t][best[t]]) for t in counted if t in found[:, best[t]]]
    chosen = [(best[t],) if t in counted else () for t in range(tokens)]
    loss, weights, where, counts = top1gating(logits, factor, 2, mask, use_rts=False)
    want = dense(kept, tokens, experts, width)
    assert weights.shape == want.shape
    torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-6)
    assert torch.equal(where, want > 0)
    assert counts.tolist() == seen
    assert loss.item() == pytest.approx(loss_of(p, chosen, experts, 1), abs=1e-5)


@pytest.mark.parametrize(("tokens", "experts"), SHAPES)
def test_random_token_selection_keeps_the_tokens_with_the_largest_lots(tokens: int, experts: int) -> None:
    logits = logits_of(tokens, experts, 2)
    lots = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(9))
    routed = gate(logits, GateRule(1, 0.5, 1), NoiseStream("lots", torch.Generator().manual_seed(9)))
    best = logits.argmax(-1)
    for e in range(experts):
        wanted = [t for t in range(tokens) if best[t] == e]
        first = sorted(wanted, key=lambda t: -lots[t, e].item())[: routed.capacity]
        assert [t for t in wanted if routed.kept_mask[t, 0]] == sorted(first)


@pytest.mark.parametrize(("tokens", "experts"), SHAPES)
@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_top2(tokens: int, experts: int, factor: float) -> None:
    logits = logits_of(tokens, experts, 3)
    p = [softmax(row) for row in logits.tolist()]
    pairs = [tuple(sorted(range(experts), key=lambda e, row=row: -row[e])[:2]) for row in p]
    width = capacity(tokens, experts, 2 * factor, 1)
    seen, kept = [0] * experts, {}
    for choice in (0, 1):
        for t in range(tokens):
            e = pairs[t][choice]
            if seen[e] < width:
                kept[t, choice] = (t, e, seen[e])
            seen[e] += 1
    entries = []
    for (t, choice), place in kept.items():
        both = sum(p[t][pairs[t][c]] for c in (0, 1) if (t, c) in kept)
        entries.append((*place, p[t][pairs[t][choice]] / both))
    loss, weights, _, counts = top2gating(logits, factor, 1, top2_2nd_expert_sampling=False)
    torch.testing.assert_close(weights.double(), dense(entries, tokens, experts, width), atol=1e-6, rtol=1e-6)
    assert counts.tolist() == seen
    assert loss.item() == pytest.approx(loss_of(p, [pair[:1] for pair in pairs], experts, 1), abs=1e-5)


@pytest.mark.parametrize(("tokens", "experts"), [(16, 4), (33, 8), (7, 3)])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk(tokens: int, experts: int, k: int, policy: str) -> None:
    logits = logits_of(tokens, experts, 4)
    p = [softmax(row) for row in logits.tolist()]
    chosen = [tuple(sorted(range(experts), key=lambda e, row=row: -row[e])[:k]) for row in p]
    width = capacity(tokens, experts, 0.6 * k, 1)
    kept: list[set[int]] = []
    for e in range(experts):
        wanted = [t for t in range(tokens) if e in chosen[t]]
        if policy == "probs":
            wanted.sort(key=lambda t, e=e: -p[t][e])
        kept.append(set(wanted[:width]))
    entries = []
    for e in range(experts):
        for place, t in enumerate(sorted(kept[e])):
            total = sum(p[t][i] for i in chosen[t] if t in kept[i])
            entries.append((t, e, place, p[t][e] / total))
    loss, weights, _, counts = topkgating(logits, k, 0.6, 1, drop_policy=policy)  # type: ignore[arg-type]
    torch.testing.assert_close(weights.double(), dense(entries, tokens, experts, width), atol=1e-6, rtol=1e-6)
    assert counts.tolist() == [sum(e in c for c in chosen) for e in range(experts)]
    assert loss.item() == pytest.approx(loss_of(p, chosen, experts, k), abs=1e-5)


@pytest.mark.parametrize("drop_tokens", [True, False])
@pytest.mark.parametrize(
    ("form", "k"),
    [
        (partial(top1gating, use_rts=False), 1),
        (partial(top2gating, top2_2nd_expert_sampling=False), 2),
        (partial(topkgating, k=2), 2),
        (partial(topkgating, k=3, drop_policy="position"), 3),
    ],
)
def test_sparse_routes_are_the_entries_of_the_dense_form(form: Callable[..., Any], k: int, drop_tokens: bool) -> None:
    options = {"logits": logits_of(33, 8, 7), "capacity_factor": 0.5, "min_capacity": 1, "drop_tokens": drop_tokens}
    loss, weights, _, counts = form(**options)
    thin, width, number, experts, places, gates, same = form(**options, sparse_routes=True)
    assert (thin, width, number) == (loss, weights.shape[2], 8)
    assert torch.equal(counts, same)
    assert experts.shape == places.shape == gates.shape == (k, 33)
    assert (experts < 0).any() == drop_tokens
    built = torch.zeros_like(weights)
    for choice in range(k):
        for token in range(33):
            if experts[choice, token] >= 0:
                built[token, experts[choice, token], places[choice, token]] = gates[choice, token]
    assert torch.equal(built, weights)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_capacity_nothing_is_dropped(k: int) -> None:
    logits = logits_of(20, 4, 5)
    routed = gate(logits, GateRule(k, drop_tokens=False, second_sampling=False), NoiseStream("none"))
    assert routed.dropped == 0
    assert routed.capacity is None
    assert torch.equal(routed.experts, logits.sort(-1, descending=True).indices[:, :k])
    forms = {
        1: lambda: top1gating(logits, 1.0, 1, drop_tokens=False),
        2: lambda: top2gating(logits, 1.0, 1, drop_tokens=False, top2_2nd_expert_sampling=False),
        3: lambda: topkgating(logits, 3, 1.0, 1, drop_tokens=False),
    }
    _, weights, where, counts = forms[k]()
    assert weights.shape[2] == counts.max()
    assert where.sum() == 20 * k
    assert (where.sum(0) <= 1).all()  # one token a place


def test_the_second_expert_is_drawn_by_its_probability() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0]]).expand(20_000, 4).contiguous()
    kept = logits.clone()
    routed = gate(logits, GateRule(2, drop_tokens=False), NoiseStream("x", torch.Generator().manual_seed(0)))
    assert torch.equal(logits, kept)
    drawn = torch.bincount(routed.experts[:, 1], minlength=4).double() / 20_000
    want = torch.tensor([0.0, *softmax([1.0, 0.0, -1.0])], dtype=torch.float64)
    torch.testing.assert_close(drawn, want, atol=0.015, rtol=0)


def test_noise_draws_the_first_expert_by_its_probability() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(20_000, 3)
    routed = gate(
        logits, GateRule(1, drop_tokens=False, noise="RSample"), NoiseStream("x", torch.Generator().manual_seed(0))
    )
    drawn = routed.counts.double() / 20_000
    torch.testing.assert_close(drawn, torch.tensor(softmax([2.0, 1.0, 0.0]), dtype=torch.float64), atol=0.015, rtol=0)


def test_a_recomputed_forward_draws_the_same_noise_and_another_layer_other_noise() -> None:
    state = torch.get_rng_state()
    a = NoiseStream("a").uniform((8,), torch.device("cpu"))
    torch.set_rng_state(state)
    again = NoiseStream("a").uniform((8,), torch.device("cpu"))
    torch.set_rng_state(state)
    b = NoiseStream("b").uniform((8,), torch.device("cpu"))
    assert torch.equal(a, again)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_are_those_of_autograd_through_the_formula(k: int) -> None:
    logits = logits_of(12, 4, 6).double().requires_grad_()
    rule = GateRule(k, 0.7, 1, use_rts=False, second_sampling=False)

    def weigh(x: Tensor) -> Tensor:
        routed = gate(x, rule, NoiseStream("g"))
        return torch.cat((routed.weights.flatten(), routed.loss[None]))

    assert torch.autograd.gradcheck(weigh, logits)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_tokens_and_nan(k: int) -> None:
    routed = gate(torch.empty(0, 4, requires_grad=True), GateRule(k), NoiseStream("e"))
    routed.loss.backward()
    assert routed.experts.shape == (0, k)
    assert routed.loss == 0
    broken = torch.zeros(3, 4)
    broken[1] = float("nan")
    routed = gate(broken, GateRule(k, drop_tokens=False), NoiseStream("n"))
    assert routed.weights[1].isnan().all()
    assert not routed.weights[[0, 2]].isnan().any()
    assert ((routed.experts >= 0) & (routed.experts < 4)).all()


def test_one_expert_takes_all() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0]]).expand(16, 4)
    routed = gate(logits, GateRule(1, 1.0, 1, use_rts=False), NoiseStream("o"))
    assert routed.counts.tolist() == [16, 0, 0, 0]
    assert routed.dropped == 12
    found = torch.topk(torch.eye(4, dtype=torch.int64)[routed.experts[:, 0]], 4, dim=0)[1][:, 0]
    assert routed.kept_mask[:, 0].nonzero().flatten().tolist() == sorted(found.tolist())


def test_equal_probabilities_keep_the_tokens_that_topk_finds() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]).repeat(12, 1)
    gates = logits.softmax(1)
    values, best = torch.topk(gates, 3, dim=1)
    chosen = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, best, True)
    routed = gate(logits, GateRule(3, 0.5, 1), NoiseStream("o"))
    ranked = torch.zeros_like(gates).scatter(1, best, values)
    found = torch.topk(ranked, routed.capacity, dim=0, sorted=False)[1]
    kept = chosen & torch.zeros_like(chosen).scatter_(0, found, True)
    assert torch.equal(torch.zeros_like(kept).scatter_(1, routed.experts, routed.kept_mask), kept)
    assert 0 < int(kept.sum()) < int(chosen.sum())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: gate(torch.zeros(3, 2), GateRule(3), NoiseStream("x")),
        lambda: gate(torch.zeros(3), GateRule(1), NoiseStream("x")),
        lambda: gate(torch.zeros(3, 2), GateRule(2), NoiseStream("x"), torch.ones(3)),
        lambda: gate(torch.zeros(3, 2), GateRule(1), NoiseStream("x"), torch.ones(4)),
        lambda: GateRule(0),
        lambda: GateRule(capacity_factor=0.0),
        lambda: topkgating(torch.zeros(3, 4), 5, 1.0, 1),
    ],
)
def test_what_cannot_be_is_said(wrong: object) -> None:
    with pytest.raises(PlanError, match="moe-routing"):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "minimum", "expected"),
    [
        (10, 4, 1.0, 0, 3),
        (10, 4, 1.25, 0, 4),
        (8, 4, 1.0, 0, 2),
        (8, 4, 1.0, 4, 4),
        (0, 4, 1.0, 0, 0),
        (0, 4, 1.0, 2, 2),
    ],
)
def test_capacity_is_an_even_share_rounded_up(tokens, experts, factor, minimum, expected):
    places = capacity_of(tokens, experts, factor, minimum)
    assert places == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"capacity_factor": float("nan")},
        {"capacity_factor": float("inf")},
        {"z_loss": float("nan")},
        {"use_rts": "yes"},
        {"k": True},
    ],
)
def test_rules_that_say_nothing_are_refused(keys):
    with pytest.raises(PlanError):
        TopKGate(8, 4, GateRule(**keys))


def test_a_factor_for_evaluation_is_not_dropped():
    with pytest.raises(PlanError, match="factor 0"):  # was taken for the one of training
        TopKGate(8, 4, GateRule(), 0.0)
