"""A forward that ends early leaves nothing open, and what fails on one rank while a model is sharded ends all ranks with its reason."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_config.errors import PlanError, ShardedAccessError
from ds_testing import world
from ds_zero import OffloadPolicy
from ds_zero._torch import unpack_hook
from ds_zero.runtime.unit import Unit

WHOLE_UNITS = ds_zero.UnitSizePolicy(max_numel=256, persist_numel=0)


class Interrupting(nn.Module):
    """A layer that raises once, in the forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.raises = nn.Linear(16, 16), []

    def forward(self, x):
        if self.raises:
            raise self.raises.pop()  # by no name: a frame that knows its error is freed late
        return torch.tanh(self.linear(x))


def net(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Interrupting() for _ in range(layers)))


def shard(model, **options):
    return ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, policy=WHOLE_UNITS, **options)


def batch(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def step(model, optimizer, number):
    loss = model(batch(number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def in_wait(monkeypatch, place):
    """Interrupt the wait for the gather of one unit once, on every rank, inside our pre-hook."""
    plain, left = Unit.finish_unshard, [place]

    def finish_unshard(self):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(Unit, "finish_unshard", finish_unshard)


def suspended(model, optimizer, monkeypatch):
    del monkeypatch
    optimizer.suspend()
    with pytest.raises(ShardedAccessError):
        model(batch(0))
    optimizer.resume()


def interrupted_gather(model, optimizer, monkeypatch):
    del optimizer
    with monkeypatch.context() as patch:
        in_wait(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))


def interrupted_layer(model, optimizer, monkeypatch):
    del optimizer, monkeypatch
    model[2].raises.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))


def interrupted_at_other_places(model, optimizer, monkeypatch):
    del optimizer, monkeypatch
    model[dist.get_rank() * 2].raises.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))


def interrupted_on_one_rank(model, optimizer, monkeypatch):
    del optimizer, monkeypatch
    if dist.get_rank() == 1:
        model[1].raises.append(SystemExit())
        with pytest.raises(SystemExit):
            model(batch(0))
    else:
        with torch.no_grad():
            model(batch(0))


def failed_layer(model, optimizer, monkeypatch):
    del optimizer, monkeypatch
    if dist.get_rank() == 0:
        model[1].raises.append(RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            model(batch(0))
    else:
        with torch.no_grad():
            model(batch(0))


def failed_user_hook(model, optimizer, monkeypatch):
    """A hook that runs before ours raises: ours after the forward has nothing to end."""
    del optimizer, monkeypatch

    def refuse(module, args):
        raise ValueError("wrong input")

    handle = model[1].register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="wrong input"):
        model(batch(0))
    handle.remove()


ENDS = [
    suspended, interrupted_gather, interrupted_layer, interrupted_at_other_places, interrupted_on_one_rank, failed_layer, failed_user_hook,
]  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@world(2)
def test_the_phase_is_over_after_it(end, overlap, monkeypatch):
    ds_comm.init_distributed(deadline_s=15)
    model, twin = net(), net()
    optimizer, other = shard(model, overlap=overlap), shard(twin, overlap=overlap)
    assert step(model, optimizer, 0) == step(twin, other, 0)
    end(model, optimizer, monkeypatch)
    if dist.get_rank() == 0:  # of one rank: no collective as long as nothing runs
        assert len(model.state_dict()) == 8
    gathering = optimizer.sharding.runtime.gathering
    gathering.phase()
    assert unpack_hook() is None
    for number in range(1, 4):
        assert step(model, optimizer, number) == step(twin, other, number)
        assert gathering.phase() is None
        assert unpack_hook() is None
        assert not any(gathering.running)
    optimizer.close()
    other.close()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@world(1)
def test_a_call_inside_an_except_clause_did_not_raise():
    model = net()
    optimizer = shard(model)
    try:
        raise ValueError
    except ValueError:
        loss = model(batch(0)).square().mean()
    loss.backward()
    optimizer.step()
    assert not any(optimizer.sharding.runtime.gathering.running)
    optimizer.close()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
@world(2, backend=None)
def test_a_folder_that_fails_on_one_rank_ends_all_with_the_reason(backend, stage, scattered, tmp_path):
    ds_comm.init_distributed(backend, deadline_s=20)
    folder = tmp_path / f"rank{dist.get_rank()}"
    if dist.get_rank() == 1:
        folder.write_text("a file, not a folder")
    with ds_zero.Init(enabled=scattered):
        model = net()
    with pytest.raises(PlanError) as caught:
        ds_zero.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, policy=WHOLE_UNITS,
            offload_optimizer=OffloadPolicy("file", str(folder)),
        )  # fmt: skip
    assert caught.value.code == "offload-folder"
    assert "rank1" in str(caught.value)
    ds_comm.barrier()  # in step with the others
    ds_comm.destroy_process_group()
