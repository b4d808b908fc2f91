"""torch's DistributedDataParallel around a model whose experts lie on several ranks."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_comm.ddp import leave_out
from ds_config.errors import PlanError
from ds_moe import place_experts
from ds_testing import world

RATE, STEPS = 0.05, 3


def trained(bench, ep_size, outer=False):
    """Parameters of this rank after some steps in DDP, by logical name; the second step has two backwards."""
    rank = dist.get_rank()
    net = bench.model(ep_size, rank % ep_size, k=2)
    whole = nn.Sequential(net) if outer else net
    placed = place_experts(whole)
    model = DistributedDataParallel(whole)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        if step == 1:
            with model.no_sync():
                model(bench.batch(rank, step=10)).backward()
        model(bench.batch(rank, step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    placed.close()
    return bench.logical({name: p.detach() for name, p in net.named_parameters()}, rank % ep_size, ep_size)


def wanted(bench):
    """The same in one process, which sees the batches of all ranks."""
    size = dist.get_world_size()
    net = bench.model(k=2)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for step in range(STEPS):
        for number in (10, step) if step == 1 else (step,):
            (sum(bench.dense(net, bench.batch(rank, step=number)) for rank in range(size)) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


@world(2)
def test_experts_of_two_ranks_train_as_in_one_process(bench):
    """Rank 1's experts became copies of rank 0's."""
    found = trained(bench, 2)
    bench.close(found, wanted(bench), 1e-9)
    own = found[f"moe.deepspeed_moe.experts.deepspeed_experts.{4 * dist.get_rank()}.up.weight"]
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    assert not torch.equal(*both)


@world(4)
def test_experts_that_two_ranks_hold_train_as_in_one_process(bench):
    bench.close(trained(bench, 2), wanted(bench), 1e-9)


@world(2)
def test_a_module_around_the_model_is_refused_unless_it_is_placed(bench):
    net = bench.model(2, dist.get_rank())
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    place_experts(net)
    with pytest.raises(PlanError, match="would overwrite 16 tensors") as error:
        DistributedDataParallel(nn.Sequential(net))
    assert error.value.code == "comm-ddp"
    bench.close(dict(net.named_parameters()), before, 0.0)  # nothing was sent
    bench.close(trained(bench, 2, outer=True), wanted(bench), 1e-9)


@world(2)
def test_what_somebody_leaves_out_himself_is_his(bench):
    rank = dist.get_rank()
    net = bench.model(2, rank, k=2)
    place_experts(net)
    whole = nn.Sequential(net)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        whole, [name for name, _ in whole.named_parameters() if "deepspeed_experts" in name]
    )
    DistributedDataParallel(whole)(bench.batch(rank)).backward()
    plain = bench.model(2, rank, k=2)
    place_experts(plain)
    plain(bench.batch(rank)).backward()
    for mine, same in zip(*(m.moe.deepspeed_moe.experts.parameters() for m in (net, plain)), strict=True):
        assert torch.equal(mine.grad, same.grad)  # not averaged


@world(2)
def test_gradients_are_reduced_only_while_there_is_a_ddp(bench):
    rank = dist.get_rank()
    net = bench.model(2, rank, k=2)
    place_experts(net)
    x = bench.batch(rank)

    def grad(model):
        net.zero_grad()
        model(x).backward()
        return next(net.moe.deepspeed_moe.experts.parameters()).grad.clone()

    model = DistributedDataParallel(net)
    averaged = grad(model)
    assert torch.equal(grad(model), averaged)
    del model
    gc.collect()
    assert torch.equal(grad(net), 2 * averaged)
    again = DistributedDataParallel(net)
    assert torch.equal(grad(again), averaged)  # once, although the hooks are there from before


def test_a_copy_of_a_placed_model_is_left_out_on_its_own(bench):
    net = bench.model()
    leave_out(net, {"first.weight": lambda grad: grad})
    twin = copy.deepcopy(net)
    assert twin._ds_left_out is not net._ds_left_out
    assert twin._ds_left_out.hooks == []
    assert list(twin._ds_left_out.reduce) == ["first.weight"]
