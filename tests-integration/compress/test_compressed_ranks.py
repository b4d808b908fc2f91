"""Compressed training over two ranks at every ZeRO stage equals one process, for each technique; it resumes on another stage."""

from __future__ import annotations

import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_comm import self_group
from ds_compress import compression_scheduler, init_compression
from ds_testing import world

spec = spec_from_file_location(
    "compress_models", Path(__file__).parents[2] / "packages" / "compress" / "tests" / "conftest.py"
)
models = module_from_spec(spec)
spec.loader.exec_module(models)

STEPS = 5


def batch(step, rank):
    return torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net, tokens):
    logits = net(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def compressed(name):
    torch.manual_seed(0)
    return init_compression(models.Net().double(), models.SECTIONS[name])


def one_process(name):
    """Losses by step of the whole batch, trained without ds-zero; and the values in the end."""
    net = compressed(name)
    schedule = compression_scheduler(net)
    for made in schedule.layers:
        made.group = self_group("alone")
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.02), []
    for step in range(STEPS):
        loss = loss_of(net, torch.cat([batch(step, rank) for rank in range(dist.get_world_size())]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def sharded(name, stage):
    net = compressed(name)
    optimizer = ds_zero.shard(net, torch.optim.Adam(net.parameters(), lr=0.02), stage=stage)
    schedule, losses = compression_scheduler(net), []
    for step in range(STEPS):
        loss = loss_of(net, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    optimizer.close()
    return losses, net.state_dict()


@world(2)
@pytest.mark.parametrize("name", sorted(models.SECTIONS))
def test_two_ranks_equal_one_process_at_every_stage(name):
    losses, values = one_process(name)
    for stage in range(4):
        found, state = sharded(name, stage)
        assert found == pytest.approx(losses, rel=1e-9), f"stage {stage}"
        assert state.keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(state[key], value, atol=1e-7, rtol=1e-7, msg=lambda m, k=key: f"{k}: {m}")
    assert len(set(losses)) == STEPS


@world(2)
def test_ranks_that_are_given_different_masks_would_differ():
    """What the comparison above sees: without the sum over ranks, sensitivities and with them masks differ."""
    net = compressed("snip")
    schedule = compression_scheduler(net)
    loss_of(net, batch(0, dist.get_rank())).backward()
    mine = schedule.layers[0].sensitivity.clone()
    other = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(other, mine)
    assert not torch.equal(*other)
    schedule.step()
    scores = schedule.layers[0].sparse_scores
    both = [torch.empty_like(scores) for _ in range(2)]
    dist.all_gather(both, scores)
    assert torch.equal(*both)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(net.state_dict(), Path(folder) / "state.pt")
        again = compressed("snip")
        again.load_state_dict(torch.load(Path(folder) / "state.pt"))
        assert torch.equal(compression_scheduler(again).layers[0].sparse_scores, scores)
