"""Submodules called by themselves at stage 3, others on each rank: gathers are of the same units in the same order all the same."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_zero
from ds_config.errors import PlanError
from ds_testing import world
from ds_zero._torch import unpack_hook

NONE_STAYS = ds_zero.UnitSizePolicy(max_numel=300, persist_numel=0)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, again=""):
        x = self.a(x) + self.b(x)
        return self.head(x if not again else self.get_submodule(again)(x))


def alike(net, x, rank):
    return net.head(net.a(x) if rank == 0 else net.b(x))


def crossed(net, x, rank):
    """The same ones in another order."""
    return net.head(net.a(net.b(x)) if rank == 0 else net.b(net.a(x)))


WAYS = {way.__name__: way for way in (alike, crossed)}


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("way", WAYS)
@world(2)
def test_each_rank_may_call_submodules_of_its_own(way, offload):
    """Units of one size took each other's weights, in silence."""
    torch.manual_seed(0)
    net = Branches()
    plain = copy.deepcopy(net)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {"offload_params": ds_zero.OffloadPolicy("host")} if offload else {"memory": "private"}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=NONE_STAYS, **options)
    batches = torch.randn(4, 2, 5, 16)
    for batch in batches:
        reference.zero_grad()
        outputs = [WAYS[way](plain, x, rank) for rank, x in enumerate(batch)]
        (sum(output.square().mean() for output in outputs) / 2).backward()
        for param in plain.parameters():  # a sum over ranks has zeros where one has no gradient
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        output = WAYS[way](net, batch[dist.get_rank()], dist.get_rank())
        torch.testing.assert_close(output, outputs[dist.get_rank()])
        output.square().mean().backward()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@world(2)
def test_other_units_on_the_spot_inside_a_forward():
    """A second use has no place in the order of a phase: the ranks say which unit they mean."""
    net = Branches()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=NONE_STAYS, memory="private")
    way = "ab"[dist.get_rank()]
    torch.testing.assert_close(net(torch.ones(2, 16), way), plain(torch.ones(2, 16), way))
    net(torch.ones(2, 16), "a").sum().backward()
    optimizer.step()
    optimizer.close()


@world(2)
def test_other_units_on_the_spot_in_the_loss_are_refused():
    """Between forward and backward all ranks compute the same loss."""
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=NONE_STAYS, memory="private")
    output = net(torch.ones(2, 16), "a")
    with pytest.raises(PlanError, match=r"rank 0 needs a.weight once more and rank 1 b.weight") as error:
        (net.a if dist.get_rank() == 0 else net.b).weight.square().sum()
    assert error.value.code == "zero-calls-differ"
    del error
    output.sum().backward()
    optimizer.step()
    optimizer.close()


@world(4)
def test_calls_of_several_sets_of_ranks_are_refused():
    """Experts on pairs of ranks are cut over these; which submodules another pair calls, they cannot know."""
    net = Branches()
    pair = ds_comm.as_group(dist.new_subgroups(2)[0])
    for param in net.b.parameters():
        ds_comm.set_param_sharding(param, ds_comm.ParamSharding(ds_comm.ReductionGroup("pairs", pair, divisor=4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=3, policy=NONE_STAYS, memory="private")
    with pytest.raises(PlanError, match="call other modules by themselves: a, head") as error:
        (net.a if dist.get_rank() == 0 else net.head)(torch.ones(2, 16))
    assert error.value.code == "zero-calls-differ"


class Pausing(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x, pause):
        x = x @ self.up
        pause()
        return x @ self.down


class InTurn(nn.Module):
    """Calls its parts from two threads, of which one runs at a time: both are inside of a part at once."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Pausing() for _ in range(3))

    def half(self, x, pause):
        for part in self.parts:
            x = part(x, pause)
        return x

    def forward(self, x):
        turns, results, over = [threading.Semaphore(1), threading.Semaphore(0)], [None, None], [False, False]

        def pause(own):
            if not over[1 - own]:
                turns[1 - own].release()
                turns[own].acquire()

        def run(own):
            turns[own].acquire()
            results[own] = self.half(x[own::2], lambda: pause(own))
            over[own] = True
            turns[1 - own].release()

        second = threading.Thread(target=run, args=(1,))
        second.start()
        run(0)
        second.join()
        return torch.cat(results)


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_a_module_may_be_called_in_two_threads_in_turn(stage):
    """A unit was released when one of them left, and stayed gathered until the update from then on."""
    torch.manual_seed(0)
    net = InTurn()
    plain = copy.deepcopy(net)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = ds_zero.shard(net, optimizer, stage=stage, policy=NONE_STAYS, memory="private")
    for batch in torch.randn(3, 4, 16):
        reference.zero_grad()
        plain(batch).square().mean().backward()
        output = net(batch)
        assert unpack_hook() is None  # each thread has ended the watch that it began
        output.square().mean().backward()
        torch.testing.assert_close(output, plain(batch))
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    gathering = optimizer.sharding.runtime.gathering
    assert gathering.shared == []  # none was released, and touched in its module all the same
    assert stage == 2 or gathering.orders.observed["forward "] == gathering.released
    optimizer.close()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
