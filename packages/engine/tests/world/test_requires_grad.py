"""Layers are frozen and thawed between steps, some are in no group of the optimizer, and runs resume: the weights are a plain optimizer's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_engine
from ds_config.errors import PlanError
from ds_pipe import PipelineModule
from ds_testing import world
from ds_zero import GatheredParameters

STEPS, RANKS = 6, 2


def layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(net(x)) - x).square().mean()


def optimizer_of(net: nn.Sequential, given: list[int]) -> torch.optim.Optimizer:
    params = list(chain.from_iterable(net[i].parameters() for i in given))
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], lr=0.05)


def set_all(models: Iterable[nn.Sequential], trains: Sequence[bool]) -> None:
    for model in models:
        for layer, flag in zip(model, trains, strict=True):
            layer.requires_grad_(flag)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
@world(RANKS)
def test_drawn_changes_of_requires_grad(stage: int, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    given = sorted(draw.sample(range(4), draw.choice([2, 3, 4])))
    accumulation = draw.choice([1, 2])
    net, plain = layers(), layers()
    first = [draw.random() < 0.6 for _ in range(4)]
    first[draw.choice(given)] = True
    changes = [first] + [[draw.random() < 0.6 for _ in range(4)] if draw.random() < 0.6 else None for _ in range(STEPS)]
    set_all((net, plain), first)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    engine = ds_engine.initialize(model=net, optimizer=optimizer_of(net, given), config=config)[0]
    optimizer = optimizer_of(plain, given)
    rank = dist.get_rank()
    for step in range(STEPS):
        if step == 3 and seed % 2:  # goes on in another run, whose program begins with what is frozen first
            engine.save_checkpoint(tmp_path)
            engine.close()
            flags = [layer.weight.requires_grad for layer in net]
            net = layers()
            set_all((net,), first)
            engine = ds_engine.initialize(model=net, optimizer=optimizer_of(net, given), config=config)[0]
            engine.load_checkpoint(tmp_path)
            set_all((net,), flags)
        wanted = changes[step]
        if wanted is not None:
            wanted[given[0]] |= not any(wanted)
            set_all((net, plain), wanted)
        for micro in range(accumulation):
            loss = engine.forward(batch(step, micro, rank))
            engine.backward((torch.tanh(loss) - batch(step, micro, rank)).square().mean())
            engine.step()
            for each in range(RANKS):
                (loss_of(plain, batch(step, micro, each)) / (RANKS * accumulation)).backward()
        nn.utils.clip_grad_norm_(chain.from_iterable(g["params"] for g in optimizer.param_groups), 0.3)
        optimizer.step()
        plain.zero_grad()
    with GatheredParameters(list(net.parameters())):
        for (name, param), other in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-4, atol=1e-5, msg=name)
    engine.close()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1])
@world(4)
def test_a_stage_thaws_what_others_do_not_have(stage: int, size: int, tmp_path: Path) -> None:
    """Only ranks with the layer know that it was thawed; planning anew is collective over all of them."""

    def train(steps: range, load: bool) -> list[torch.Tensor]:
        net = PipelineModule(
            list(layers()), num_stages=size, loss_fn=lambda out, x: (torch.tanh(out) - x).square().mean()
        )
        held = [layer for layer in net.children() if isinstance(layer, nn.Linear)]
        first = dist.get_rank() < 4 // size
        if first:
            held[0].requires_grad_(False)
        params = list(net.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.3,
            "zero_optimization": {"stage": stage},
        }
        engine = ds_engine.initialize(model=net, optimizer=torch.optim.AdamW(params, lr=0.05), config=config)[0]
        if load:
            engine.load_checkpoint(tmp_path)
        data = engine.mesh["data"].rank
        for step in steps:
            if first and step >= 2:
                held[0].requires_grad_(True)
            engine.train_batch((x, x) for x in (batch(step, micro, data) for micro in range(2)))
            if step == 3:
                engine.save_checkpoint(tmp_path)
        values = [param.detach().clone() for param in net.parameters()]
        engine.close()
        return values

    plain = layers()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(STEPS):
        plain[0].requires_grad_(step >= 2)
        parts = 4 // size
        for micro in range(2):
            for data in range(parts):
                (loss_of(plain, batch(step, micro, data)) / (2 * parts)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    expected = [param for layer in plain for param in layer.parameters()]
    each = len(expected) // size
    here = dist.get_rank() // (4 // size)
    for values in (train(range(STEPS), False), train(range(4, STEPS), True)):
        for value, other in zip(values, expected[here * each : (here + 1) * each], strict=True):
            torch.testing.assert_close(value, other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
@world(RANKS)
def test_a_group_is_added_to_the_optimizer_that_was_given(stage: int) -> None:
    """As callbacks do that unfreeze layer by layer: they have the program's optimizer, or the one that `initialize` returned."""
    net, plain = layers(), layers()
    set_all((net, plain), [True, True, False, False])
    own, twin = optimizer_of(net, [0, 1]), optimizer_of(plain, [0, 1])
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine, returned, *_ = ds_engine.initialize(model=net, optimizer=own, config=config)
    for step in range(6):
        for number, ours in ((2, own), (3, returned)):
            if step == number:
                set_all((net, plain), [layer <= number for layer in range(4)])
                ours.add_param_group({"params": net[number].parameters(), "lr": 0.01})
                twin.add_param_group({"params": plain[number].parameters(), "lr": 0.01})
        engine.backward(loss_of(engine, batch(step, 0, dist.get_rank())))
        engine.step()
        for rank in range(RANKS):
            (loss_of(plain, batch(step, 0, rank)) / RANKS).backward()
        twin.step()
        twin.zero_grad()
    assert {p.group for unit in engine.plan.zero.units for p in unit.spec.params if p.group is not None} == {0, 1, 2, 3}
    with GatheredParameters(net):
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(RANKS)
def test_a_graph_waits_while_a_layer_is_thawed(stage: int) -> None:
    """Units are planned anew between two forwards of one loss."""
    net, plain = layers(), layers()
    set_all((net, plain), [False, True, True, True])
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine = ds_engine.initialize(model=net, optimizer=optimizer_of(net, [0, 1, 2, 3]), config=config)[0]
    twin = optimizer_of(plain, [0, 1, 2, 3])
    for step in range(3):
        first, others = (
            loss_of(engine, batch(step, 0, dist.get_rank())),
            [loss_of(plain, batch(step, 0, r)) for r in range(RANKS)],
        )
        if step == 1:
            set_all((net, plain), [True] * 4)
        engine.backward(first + loss_of(engine, batch(step, 1, dist.get_rank())))
        engine.step()
        (sum(one + loss_of(plain, batch(step, 1, r)) for r, one in enumerate(others)) / RANKS).backward()
        twin.step()
        twin.zero_grad()
    with GatheredParameters(net):
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    engine.close()


@world(2)
def test_a_stage_does_not_train_what_no_stage_has() -> None:
    """Only the last stage would have its gradient."""
    net = PipelineModule(list(layers()), num_stages=2, loss_fn=lambda out, x: out.square().mean())
    params = [*net.parameters(), nn.Parameter(torch.zeros(()))]
    config = {"train_micro_batch_size_per_gpu": 3}
    with pytest.raises(PlanError) as error:
        ds_engine.initialize(model=net, optimizer=torch.optim.AdamW(params), config=config)
    assert error.value.code == "zero-foreign-parameters"
