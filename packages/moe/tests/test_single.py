"""One process: the layer against a dense loop, residual experts, weights before experts, utilities, pure arithmetic."""

import copy

import pytest
import torch
from torch import nn

from ds_comm import MeshSpec
from ds_config.errors import PlanError
from ds_moe import (
    MoE,
    RouterOptions,
    apply_expert_parallel,
    expert_load,
    place_ranks,
    report_load,
    select_experts,
    utils,
)
from ds_moe.config import ExpertParallelConfig
from ds_moe.dispatch import exchange_of, reorder, through_experts
from ds_moe.expert_groups import alone
from ds_monitor import MemorySink, configure, shutdown


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))


def test_exchange_is_what_two_ranks_agree_on() -> None:
    mine, theirs = [1, 2, 0, 4], [3, 0, 5, 1]  # rows of ranks 0 and 1 for each of four experts
    zero = exchange_of(mine, [mine[:2], theirs[:2]])
    one = exchange_of(theirs, [mine[2:], theirs[2:]])
    assert (zero.send, zero.receive, one.send, one.receive) == ((3, 4), (3, 3), (3, 6), (4, 6))
    assert zero.chunks == (1, 2, 3, 0)
    assert zero.order == (0, 2, 1, 3)
    assert zero.bounds == (4, 6)


def test_reordered_chunks_and_their_gradient() -> None:
    x = torch.arange(12.0).view(6, 2).requires_grad_()
    out = reorder(x, [2, 1, 3], [2, 0, 1])
    assert out[:, 0].tolist() == [6, 8, 10, 0, 2, 4]
    (out * torch.arange(6.0)[:, None]).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [3, 4, 5, 0, 1, 2]
    assert reorder(x, [2, 0, 4], [0, 2, 1]) is x


@pytest.mark.parametrize("first", [False, True])
def test_expert_groups_of_a_mesh(first: bool) -> None:
    ranks = place_ranks(MeshSpec(data_shard=4, tensor=2), 2, data_first=first)
    near, far = {(0, 2), (4, 6), (1, 3), (5, 7)}, {(0, 4), (2, 6), (1, 5), (3, 7)}
    assert (set(ranks.expert), set(ranks.data)) == ((far, near) if first else (near, far))
    assert set(ranks.holders) == ({(0, 1, 2, 3), (4, 5, 6, 7)} if first else {(0, 1, 4, 5), (2, 3, 6, 7)})
    with pytest.raises(PlanError, match="moe-places"):
        place_ranks(MeshSpec(data_shard=4), 3)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("drop", [False, True])
def test_dense_loop_in_single_precision(k: int, drop: bool) -> None:
    torch.manual_seed(k)
    layer = MoE(6, mlp(), 4, k=k, drop_tokens=drop, use_rts=False, top2_2nd_expert_sampling=False, min_capacity=1)
    for param in layer.deepspeed_moe.experts.parameters():
        nn.init.normal_(param, std=0.4)
    x = torch.randn(3, 7, 6, requires_grad=True)
    out, loss, counts = layer(x)
    routed = layer.deepspeed_moe.gate(x.reshape(-1, 6))
    dense = torch.zeros(21, 6)
    for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        dense = dense + expert(x.reshape(-1, 6)) * (routed.weights * (routed.experts == number)).sum(1)[:, None]
    params = [x, *layer.parameters()]
    found = torch.autograd.grad(out.square().mean() + loss, params)
    wanted = torch.autograd.grad(dense.square().mean() + routed.loss, params)
    torch.testing.assert_close(out.reshape(21, 6), dense, atol=1e-6, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert counts.sum() == 21 * k


def test_residual_experts_mix_with_a_dense_one() -> None:
    torch.manual_seed(0)
    layer = MoE(6, mlp(), 2, k=1, use_residual=True, drop_tokens=False)
    x = torch.randn(5, 6)
    out, _, _ = layer(x)
    mix = layer.coefficient(x).softmax(-1)
    want = layer.deepspeed_moe(x) * mix[:, :1] + layer.mlp(x) * mix[:, 1:]
    torch.testing.assert_close(out, want)


def test_weights_before_experts() -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    scales = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def run(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        routed = select_experts(logits, RouterOptions(2))

        def compute(rows: torch.Tensor, at: object) -> torch.Tensor:
            numbers = routed.experts.flatten().sort(stable=True).values
            return (rows * scales[numbers][:, None]) ** 2  # not linear, so the order matters

        return through_experts(x, routed, compute, alone(), weigh_first=True)

    assert torch.autograd.gradcheck(run, (x, logits))
    routed = select_experts(logits, RouterOptions(2))
    each = (x[:, None] * routed.weights[..., None] * scales[routed.experts][..., None]) ** 2
    torch.testing.assert_close(run(x, logits), each.sum(1))


def test_used_tokens_and_tuples() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.inner(x), None

    layer = MoE(6, Pair(), 3, k=1, drop_tokens=False)
    used = torch.tensor([1, 0, 1, 1, 0])
    out, _, counts = layer(torch.randn(5, 6), used)
    assert (out[used == 0] == 0).all()
    assert counts.sum() == 3
    assert expert_load(layer)["deepspeed_moe"].dropped == 2


def test_tutel_is_told_to_do_nothing() -> None:
    with pytest.warns(UserWarning, match="use_tutel"):
        MoE(6, mlp(), use_tutel=True)
    with pytest.raises(PlanError, match="noisy_gate_policy"):
        MoE(6, mlp(), noisy_gate_policy="Loud")


def test_a_copied_and_saved_layer_is_the_same() -> None:
    layer = MoE(6, mlp(), 2, k=1, drop_tokens=False)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(4, 6)
    assert torch.equal(layer(x)[0], twin(x)[0])
    assert "deepspeed_moe.experts.deepspeed_experts.1.0.weight" in layer.state_dict()
    assert "deepspeed_moe.gate.wg.weight" in layer.state_dict()


def test_gauges_of_load() -> None:
    layer = MoE(6, mlp(), 2, k=1, drop_tokens=False)
    layer(torch.randn(8, 6))
    report_load(layer)  # nobody listens: nothing is read, and nothing forgotten
    sink = MemorySink()
    configure([sink])
    try:
        report_load(layer)
    finally:
        shutdown()
    names = {record.name for record in sink.records}
    assert {f"moe/deepspeed_moe/{what}" for what in ("dropped", "entropy", "largest")} <= names


def test_parameter_groups() -> None:
    model = nn.Sequential(nn.Linear(6, 6), MoE(6, mlp(), 4, k=1))
    assert utils.has_moe_layers(model) == (True, 4)
    assert utils.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    groups = utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.5}, max_group_size=150
    )
    assert not utils.is_moe_param_group(groups[0])
    assert all(utils.is_moe_param_group(g) and g["lr"] == 0.5 and g["name"] == "ep_size_1" for g in groups[1:])
    assert all(sum(p.numel() for p in g["params"]) <= 150 for g in groups[1:])
    assert len(groups) == 5
    together = [p for g in groups for p in g["params"]]
    assert len(together) == len({id(p) for p in together}) == len(list(model.parameters()))
    shared, expert = utils.split_params_into_shared_and_expert_params(model.parameters())
    assert len(expert) == 16
    assert not any(map(utils.is_moe_param, shared))
    again = utils.configure_moe_param_groups(list(model.parameters()))
    assert len(again) == 2
    assert utils.configure_moe_param_groups(again) is again
    model(torch.randn(8, 6))[0].sum().backward()
    some, others = utils.split_params_grads_into_shared_and_expert_params(model.parameters())
    assert len(some) == 3
    assert len(others) == 16
    with pytest.raises(PlanError, match="moe-param-groups"):
        utils.configure_moe_param_groups("no")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("noise", [None, "RSample", "Jitter"])
def test_an_evaluation_depends_on_no_chance_and_on_no_other_row(k: int, noise: str | None) -> None:
    """The second expert was drawn, full experts kept tokens by lot, and 37 of 256 rows came out as zeros."""
    torch.manual_seed(k)
    layer = MoE(6, mlp(), 8, k=k, noisy_gate_policy=noise).eval()
    for expert in layer.deepspeed_moe.experts.parameters():
        nn.init.normal_(expert, std=0.4)
    x = torch.randn(64, 6)
    out = layer(x)[0]
    assert torch.equal(layer(x)[0], out)
    assert torch.allclose(torch.cat([layer(row[None])[0] for row in x]), out, atol=1e-6)
    assert (out != 0).any(-1).all()


def test_an_evaluation_drops_what_its_capacity_says() -> None:
    torch.manual_seed(0)
    layer = MoE(6, mlp(), 2, k=1, eval_capacity_factor=0.5, min_capacity=1).eval()
    first = layer(x := torch.randn(64, 6))[0]
    assert int((first == 0).all(-1).sum()) >= 32
    assert torch.equal(layer(x)[0], first)
    assert not (MoE(6, mlp(), 2, drop_tokens=False, eval_capacity_factor=0.5).eval()(x)[0] == 0).all(-1).any()


class Listed(nn.Module):
    """A block of a user's own, which may return its router's logits."""

    def __init__(self, returns_logits: bool) -> None:
        super().__init__()
        self.gate, self.returns_logits = nn.Linear(6, 4, bias=False), returns_logits
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(2)
        out = sum(expert(x) * ((chosen == n) * weights).sum(-1, keepdim=True) for n, expert in enumerate(self.experts))
        return (out, logits) if self.returns_logits else out


@pytest.mark.parametrize("returns_logits", [False, True])
def test_a_users_block_returns_what_it_returned(returns_logits):
    torch.manual_seed(1)
    model, x = nn.Sequential(Listed(returns_logits)), torch.randn(3, 6)
    wanted, state = model(x), torch.get_rng_state()
    section = ExpertParallelConfig(enabled=True, moe_layer_pattern="0", top_k=2, score_func="softmax", route_norm=False)
    cut = apply_expert_parallel(model, section)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model(x), wanted)
    cut.undo()
