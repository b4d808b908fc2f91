"""torch's FSDP2 around a model whose experts lie on several ranks: over the ranks that hold them, or refused."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ds_comm.shm import shm_group
from ds_config.errors import PlanError
from ds_moe import clip_grad_norm_, place_experts
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")
RATE, STEPS, CLIP = 0.05, 3, 0.5


@contextmanager
def shared_memory(meet):
    """A group without threads: torch's caches of DTensors keep the mesh, and with it the group, for as long as the process lives."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("shm", store=dist.FileStore(str(meet / "store"), size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(bench):
    """Parameters after some steps: experts on pairs of ranks (2 x expert parallel 2), everything sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "expert"))
    rank = dist.get_rank()
    net = bench.model(2, rank % 2, k=2)
    placed = place_experts(net)
    experts = net.moe.deepspeed_moe.experts
    fully_shard(experts, mesh=mesh["copies"])
    experts.set_gradient_divide_factor(dist.get_world_size())  # the batch is split over all ranks
    experts.set_force_sum_reduction_for_comms(True)
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    norms = []
    for step in range(STEPS):
        net(bench.batch(rank, step=step)).backward()
        norms.append(float(clip_grad_norm_(net, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: p.full_tensor().detach() for name, p in net.named_parameters()}
    placed.close()
    return norms, bench.logical(state, rank % 2, 2)


def wanted(bench):
    net, size, norms = bench.model(k=2), dist.get_world_size(), []
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for step in range(STEPS):
        (sum(bench.dense(net, bench.batch(rank, step=step)) for rank in range(size)) / size).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in net.named_parameters()}


@world(4, backend=None)
def test_experts_beside_fsdp2_train_as_in_one_process(bench, tmp_path):
    with shared_memory(tmp_path):
        (found_norms, found), (norms, whole) = trained(bench), wanted(bench)
        assert min(norms) > CLIP
        assert found_norms == pytest.approx(norms, rel=1e-9)
        bench.close(found, whole, 1e-9)


@world(2, backend=None)
def test_fsdp2_over_ranks_with_other_experts_is_refused(bench, tmp_path):
    """Rows of one rank's experts were put together with rows of the other's."""
    with shared_memory(tmp_path):
        net = bench.model(2, dist.get_rank(), k=2)
        place_experts(net)
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(PlanError, match=r"different parts: moe.*other values on ranks") as error:
            net(bench.batch(dist.get_rank()))
        assert error.value.code == "comm-fsdp"


def around(net, mesh):
    """The module around the model is sharded: what FSDP knows is out of the model's sight."""
    return fully_shard(nn.Sequential(net), mesh=mesh)


def later(net, mesh):
    """A model that was evaluated before."""
    net(torch.zeros(2, 8, dtype=torch.float64))
    return fully_shard(net, mesh=mesh)


def within(net, mesh):
    """A layer is called, and never the model."""
    fully_shard(net.moe, mesh=mesh)
    return lambda x: net.moe(net.first(x))


def first_kind(net, _):
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def first_kind_flat(net, _):
    return FullyShardedDataParallel(nn.Sequential(net), device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", [around, later, within, first_kind, first_kind_flat])
@world(2, backend=None)
def test_fsdp_is_refused_whatever_it_is_put_around_and_when(bench, tmp_path, wrap):
    with shared_memory(tmp_path):
        net = bench.model(2, dist.get_rank(), k=2)
        place_experts(net)
        model = wrap(net, init_device_mesh("cpu", (2,)))
        with pytest.raises(PlanError, match=r"different parts: .*other values on ranks") as error:
            model(bench.batch(dist.get_rank()))
        assert error.value.code == "comm-fsdp"


@world(2, backend=None)
def test_experts_that_fsdp2_leaves_alone_are_not_refused(bench, tmp_path):
    with shared_memory(tmp_path):
        net = bench.model(2, dist.get_rank(), k=2)
        place_experts(net)
        x = bench.batch(dist.get_rank())
        wanted = net(x).detach()
        apart = set(net.moe.deepspeed_moe.experts.parameters())
        model = fully_shard(nn.Sequential(net), mesh=init_device_mesh("cpu", (2,)), ignored_params=apart)
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted)
