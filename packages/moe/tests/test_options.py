"""What `MoE` does beyond DeepSpeed's layer: grouped products, experts that begin apart, expert choice, z-loss, balance by bias."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ds_config.errors import DsError, PlanError
from ds_moe import (
    GateRule,
    MoE,
    MoEOptions,
    NoiseStream,
    balance_experts,
    expert_load,
    gate,
    record_routing,
    replay_routing,
)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6, bias=False))


def layer(k: int = 2, **options: object) -> MoE:
    return MoE(6, mlp(), 4, k=k, drop_tokens=False, top2_2nd_expert_sampling=False, options=MoEOptions(**options))  # type: ignore[arg-type]


def pair(**options: object) -> tuple[MoE, MoE]:
    torch.manual_seed(0)
    loop, ours = layer(), layer(**options)
    with torch.no_grad():
        for param in loop.parameters():
            param.normal_(std=0.4)
    ours.load_state_dict(loop.state_dict())
    return loop, ours


def agree(loop: MoE, ours: MoE, tokens: int = 31, tolerance: float = 1e-6) -> None:
    x = torch.randn(tokens, 6)
    outs = []
    for model in (loop, ours):
        out, loss, counts = model(x)
        (out.square().sum() + loss).backward()
        outs.append((out, loss, counts))
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=1e-5)
    for (name, a), b in zip(loop.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=10 * tolerance, rtol=1e-5, msg=name)


def test_a_grouped_product_equals_the_loop_over_experts() -> None:
    loop, ours = pair(grouped=True)
    assert list(loop.state_dict()) == list(ours.state_dict())
    experts = ours.deepspeed_moe.experts
    for tokens in (31, 1, 0):
        agree(loop, ours, tokens)
        loop.zero_grad()
        ours.zero_grad()
        assert experts._together, "the weights lie together, nothing is copied"
    steps = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (loop, ours)]
    for _ in range(3):
        agree(loop, ours, tolerance=1e-4)
        for step in steps:
            step.step()
            step.zero_grad()
    assert experts._together
    agree(*copy.deepcopy(pair(grouped=True)))


def test_grouped_weights_that_were_moved_are_stacked() -> None:
    loop, ours = pair(grouped=True)
    first = next(ours.deepspeed_moe.experts.parameters())
    first.data = first.data.clone()
    agree(loop, ours)
    assert not ours.deepspeed_moe.experts._together
    loop, ours = (model.double() for model in pair(grouped=True))
    assert next(ours.deepspeed_moe.experts.parameters()).dtype == torch.float64
    assert ours.deepspeed_moe.experts._together[0].dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert pair(grouped=True)[1](torch.randn(5, 6))[0].dtype == torch.bfloat16


def test_grouped_products_refuse_other_experts() -> None:
    with pytest.raises(DsError, match="Dropout") as error:
        MoE(6, nn.Sequential(nn.Linear(6, 6), nn.Dropout()), 4, options=MoEOptions(grouped=True))
    assert error.value.code == "moe-grouped"


def test_experts_begin_apart() -> None:
    torch.manual_seed(3)
    one, two = layer(draw_apart=True), layer(draw_apart=True)
    torch.manual_seed(3)
    again = layer(draw_apart=True)
    weights = [expert[0].weight for model in (one, two) for expert in model.deepspeed_moe.experts.deepspeed_experts]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    assert all(float(w.detach().abs().max()) <= 6**-0.5 for w in weights), "as nn.Linear draws"
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    alike = [expert[0].weight for expert in layer().deepspeed_moe.experts.deepspeed_experts]
    assert torch.equal(alike[0], alike[1]), "copies, as DeepSpeed's"

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

    with pytest.raises(PlanError, match="Scale") as error:
        MoE(6, Scale(), 4, options=MoEOptions(draw_apart=True))
    assert error.value.code == "moe-experts"


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_choose_tokens(grouped: bool) -> None:
    """Beside the paper's one-hot products: P, G = top-k of the scores' transpose, out = sum of G * P^T expert(P x)."""
    torch.manual_seed(1)
    model = MoE(6, mlp(), 4, k=2, capacity_factor=1.5, top2_2nd_expert_sampling=False, options=MoEOptions(expert_choice=True, draw_apart=True, grouped=grouped))  # fmt: skip
    x = torch.randn(20, 6, requires_grad=True)
    out, loss, counts = model(x)
    scores = model.deepspeed_moe.gate.wg(x).softmax(-1)
    weights, chosen = scores.t().topk(15, dim=1)  # 20 tokens * 2 / 4 experts * 1.5
    picked = nn.functional.one_hot(chosen, 20).float()
    outs = torch.stack([expert(rows) for expert, rows in zip(model.deepspeed_moe.experts.deepspeed_experts, picked @ x, strict=True)])  # fmt: skip
    wanted = torch.einsum("ect,ec,ecn->tn", picked, weights, outs)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
    params = [x, *model.parameters()]
    for a, b in zip(torch.autograd.grad(out.square().sum() + loss, params), torch.autograd.grad(wanted.square().sum(), params), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert counts.tolist() == [15] * 4
    assert expert_load(model)["deepspeed_moe"].dropped == int((picked.sum((0, 1)) == 0).sum())
    assert loss.item() == 0


def test_expert_choice_leaves_unused_tokens_and_is_not_replayed() -> None:
    rule = GateRule(1, 2.0, expert_choice=True)
    logits, used = torch.randn(8, 2), torch.tensor([1, 1, 0, 1, 0, 1, 1, 1])
    routed = gate(logits, rule, NoiseStream("x"), used)
    assert routed.kept_mask is not None
    assert routed.kept_mask[used == 0].any() == torch.tensor(False)
    assert routed.kept_mask[used == 1].all(), "8 may be chosen, 6 are there"
    model = MoE(6, mlp(), 4, options=MoEOptions(expert_choice=True))
    with record_routing(model) as tape:
        model(torch.randn(8, 6))
    with replay_routing(model, tape), pytest.raises(PlanError, match="experts choose tokens"):
        model(torch.randn(8, 6))


@pytest.mark.parametrize("choice", [False, True])
def test_the_z_loss_is_added(choice: bool) -> None:
    logits = 3 * torch.randn(12, 4, dtype=torch.float64)
    plain, with_z = (
        gate(logits, GateRule(1, expert_choice=choice, z_loss=z), NoiseStream("x")).loss for z in (0.0, 0.1)
    )
    torch.testing.assert_close(with_z - plain, 0.1 * logits.exp().sum(-1).log().square().mean())
    used = torch.arange(12) < 5
    plain, with_z = (gate(logits, GateRule(1, expert_choice=choice, z_loss=z), NoiseStream("x"), used).loss for z in (0.0, 0.1))  # fmt: skip
    torch.testing.assert_close(with_z - plain, 0.1 * logits[:5].exp().sum(-1).log().square().mean())


def test_a_bias_evens_the_load_without_a_loss() -> None:
    """Wang et al. 2024, algorithm 1 by hand; a router that loves one expert ends with an even load."""
    torch.manual_seed(0)
    model = layer(bias_rate=0.005)
    router = model.deepspeed_moe.gate
    with torch.no_grad():
        router.wg.weight[0] += 1.0
    x = torch.randn(400, 6) + 0.5
    bias, loads = torch.zeros(4), []
    for _ in range(150):
        scores = router.wg(x).softmax(-1)
        chosen = (scores + bias).topk(2).indices
        counts = model(x)[2]
        assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=4).tolist()
        loads.append(counts)
        load = counts.float()
        bias += 0.005 * torch.sign(load.mean() - load)
        balance_experts(model)
        torch.testing.assert_close(router.expert_bias, bias)
    first, last = loads[0].float(), torch.stack(loads[-50:]).float().mean(0)
    assert first.max() - first.min() > 200
    assert last.max() - last.min() < 50, "steps go to and fro around an even load"
    routed = gate(router.wg(x), router.rule, NoiseStream("x"), bias=bias)
    wanted = router.wg(x).softmax(-1).gather(1, routed.experts)
    torch.testing.assert_close(
        routed.weights, wanted / wanted.sum(-1, keepdim=True), msg="weights know nothing of the bias"
    )
    assert "deepspeed_moe.gate.expert_bias" in model.state_dict()
    assert model.bfloat16().deepspeed_moe.gate.expert_bias.dtype == torch.float32
    model.eval()(x.bfloat16())
    before = model.deepspeed_moe.gate.expert_bias.clone()
    balance_experts(model)
    assert torch.equal(before, model.deepspeed_moe.gate.expert_bias), "only training counts"


@pytest.mark.parametrize(
    "bad",
    [{"bias_rate": 0.1, "expert_choice": True}, {"z_loss": -1.0}, {"bias_rate": 0.1, "noise": "RSample"}, {"k": 2, "bias_rate": 0.1}, {"expert_choice": True, "drop_tokens": False}],
)  # fmt: skip
def test_options_that_exclude_each_other(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError) as error:
        GateRule(**bad)  # type: ignore[arg-type]
    assert error.value.code == "moe-routing"
