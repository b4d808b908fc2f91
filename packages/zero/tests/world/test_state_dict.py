"""`optimizer.state_dict()` as torch's: taken in a run, put back in it or in another one, and exchanged with a plain optimizer's."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ops.optim
import ds_zero
from ds_config.errors import CheckpointError, PlanError
from ds_testing import world

KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "ops AdamW": lambda params: ds_ops.optim.AdamW(params, lr=1e-2),
    "8 bit": lambda params: ds_ops.optim.AdamW8bit(params, lr=1e-2),
    "Muon": lambda params: ds_ops.optim.Muon(params, lr=1e-2),
}
CUT = ds_zero.UnitSizePolicy(8, 64)  # a unit a layer: ranks have parts of parameters


class Net(nn.Module):
    """Matrices, a vector, a scalar, and a layer that is used in every second step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.at_times = nn.Linear(5, 9), nn.Linear(9, 3, bias=False), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.b(torch.tanh(self.a(x))) * self.scale
        return y + self.at_times(x) if step % 2 else y


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range, ranks: list[int]) -> None:
    for step in steps:
        for rank in ranks:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(7 * step + rank))
            (net(x, step).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(net: Net) -> list[Tensor]:
    with ds_zero.GatheredParameters(net):
        return [p.detach().clone() for p in net.parameters()]


def put(net: Net, weights: list[Tensor]) -> None:
    with ds_zero.GatheredParameters(net, write=True), torch.no_grad():
        for param, value in zip(net.parameters(), weights, strict=True):
            param.copy_(value)


def saved(state: dict[str, object]) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
@world(3)
def test_a_state_is_put_back_in_the_run_and_into_another_one(kind: str, stage: int) -> None:
    one, ranks = Net(), [dist.get_rank()]
    optimizer = ds_zero.shard(one, KINDS[kind](one.parameters()), stage=stage, policy=CUT)
    train(one, optimizer, range(1), ranks)
    state, weights = saved(optimizer.state_dict()), weights_of(one)
    train(one, optimizer, range(1, 4), ranks)
    expected = weights_of(one)
    optimizer.param_groups[0]["lr"] *= 3.0
    put(one, weights)
    optimizer.load_state_dict(state)
    train(one, optimizer, range(1, 4), ranks)
    assert all(map(torch.equal, weights_of(one), expected))
    optimizer.close()

    other = Net(1)
    resumed = ds_zero.shard(other, KINDS[kind](other.parameters()), stage=stage, policy=CUT)
    put(other, weights)
    resumed.load_state_dict(state)
    train(other, resumed, range(1, 4), ranks)
    assert all(map(torch.equal, weights_of(other), expected))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "Adagrad"])
@world(2)
def test_a_plain_optimizers_state_goes_on_in_shards(kind: str, stage: int, before: bool) -> None:
    """Loaded before the model is sharded, or after."""
    twin = Net()
    plain = KINDS[kind](twin.parameters())
    train(twin, plain, range(2), [0, 1])
    net, state = copy.deepcopy(twin), saved(plain.state_dict())
    own = KINDS[kind](net.parameters())
    if before:
        own.load_state_dict(state)
    optimizer = ds_zero.shard(net, own, stage=stage, policy=CUT)
    if not before:
        optimizer.load_state_dict(state)
    train(net, optimizer, range(2, 5), [dist.get_rank()])
    train(twin, plain, range(2, 5), [0, 1])
    for ours, theirs in zip(weights_of(net), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    if stage == 0:
        train(twin, plain, range(5, 6), [0, 1])  # another step count, to be replaced
        plain.load_state_dict(optimizer.state_dict())
        assert float(plain.state[twin.a.weight].get("step", 5.0)) == 5.0


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
@world(2)
def test_state_of_what_is_frozen_when_it_is_sharded(kind: str, stage: int) -> None:
    """Of Adagrad, which makes state when it is made; of a loop that froze a layer after some steps; and thawed later."""
    ranks = list(range(dist.get_world_size()))

    def run(sharded: bool) -> list[Tensor]:
        net = Net()
        net.a.bias.requires_grad_(False)
        optimizer = KINDS[kind](net.parameters())
        train(net, optimizer, range(2), ranks)
        net.b.weight.requires_grad_(False)
        if sharded:
            optimizer = ds_zero.shard(net, optimizer, stage=stage, policy=CUT)
        train(net, optimizer, range(2, 4), ranks)
        for param in (net.b.weight, net.a.bias):
            param.requires_grad_(True)
        if sharded:
            optimizer.follow_requires_grad()
        train(net, optimizer, range(4, 6), ranks)
        return weights_of(net) if sharded else [p.detach() for p in net.parameters()]

    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@world(2)
def test_state_of_other_elements_is_refused_and_changes_nothing() -> None:
    def trained(stage: int) -> ds_zero.ShardedOptimizer:
        net = Net()
        optimizer = ds_zero.shard(net, KINDS["AdamW"](net.parameters()), stage=stage, policy=CUT)
        train(net, optimizer, range(2), [dist.get_rank()])
        return optimizer

    optimizer = trained(2)
    state = optimizer.state_dict()
    before = {s.shard.name: s.data.clone() for s in optimizer.shards()}
    whole = trained(0).state_dict()
    cut = {
        **state,
        "intervals": {place: [[a + 1, b + 1] for a, b in parts] for place, parts in state["intervals"].items()},
    }
    groups = {**whole, "param_groups": [{**whole["param_groups"][0], "params": [0, 1]}]}
    other = {"param_groups": whole["param_groups"], "state": {0: {"exp_avg": torch.zeros(5, 9)}}}
    assert state["intervals"]
    for wrong in (cut, groups, other):
        with pytest.raises(CheckpointError) as error:
            optimizer.load_state_dict(wrong)
        assert error.value.code == "zero-state-dict"
    assert all(torch.equal(before[s.shard.name], s.data) for s in optimizer.shards())
    optimizer.load_state_dict(whole)  # of the whole model: each rank takes its elements
    for local in optimizer.shards():
        torch.testing.assert_close(local.data, before[local.shard.name])


@pytest.mark.parametrize("stage", range(4))
@world(2)
def test_a_group_is_added_while_the_model_is_sharded(stage: int) -> None:
    def run(sharded: bool) -> list[Tensor]:
        net, ranks = Net(), [dist.get_rank()] if sharded else [0, 1]
        optimizer = KINDS["AdamW"](net.a.parameters())
        net.scale.requires_grad_(False)
        net.at_times.requires_grad_(False)
        if sharded:
            optimizer = ds_zero.shard(net, optimizer, stage=stage, policy=CUT)
        train(net, optimizer, range(2), ranks)
        net.scale.requires_grad_(True)
        optimizer.add_param_group({"params": [net.scale], "lr": 1e-3})
        net.at_times.requires_grad_(True)
        optimizer.add_param_group({"params": net.at_times.parameters(), "weight_decay": 0.5})
        train(net, optimizer, range(2, 5), ranks)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3, 1e-2]
        state = copy.deepcopy(optimizer.state_dict())
        train(net, optimizer, range(5, 6), ranks)
        optimizer.load_state_dict(state)
        train(net, optimizer, range(6, 8), ranks)
        return weights_of(net) if sharded else [p.detach() for p in net.parameters()]

    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@world(2)
def test_a_model_is_sharded_again_with_a_parameter_outside_of_it() -> None:
    """As when a notebook's cell is run again: what the first optimizer's end forgets is not the second one's."""
    net, temperature = Net(), nn.Parameter(torch.zeros(()))
    for stage in (2, 3):
        optimizer = ds_zero.shard(
            net, torch.optim.SGD([*net.parameters(), temperature], lr=0.1), stage=stage, policy=CUT
        )
        (net(torch.ones(2, 5), 0) * temperature.exp()).sum().backward()
        before = temperature.item()
        optimizer.step()
        assert temperature.item() != before
    optimizer.close()
    assert type(temperature) is nn.Parameter


@world(1)
def test_groups_that_cannot_be_added() -> None:
    net = Net()
    optimizer = ds_zero.shard(net, KINDS["SGD"](net.a.parameters()), stage=2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [net.a.weight]})
    with pytest.raises(PlanError) as error:
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    assert error.value.code == "zero-foreign-parameters"
    net(torch.ones(1, 5), 0).sum().backward()
    with pytest.raises(PlanError) as error:
        optimizer.add_param_group({"params": [net.b.weight]})
    assert error.value.code == "zero-add-group"
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.inner.add_param_group({"params": [net.b.weight]})
    with pytest.raises(PlanError, match="2 groups now, and had 1"):
        optimizer.step()
