"""Collectives and meshes of this package within torch's DDP and FSDP2."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm import Mesh, MeshSpec
from ds_comm.shm import shm_group
from ds_testing import world


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(net, part):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        net(x if part is None else x[4 * part : 4 * part + 4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def check(found):
    for a, b in zip(found, train(model(), None).parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@world(2)
def test_a_hook_of_ddp_that_calls_our_all_reduce() -> None:
    def hook(state, bucket):
        total = bucket.buffer() / 2
        ds_comm.all_reduce(total, unit="bucket")
        done = torch.futures.Future()
        done.set_result(total)
        return done

    net = DistributedDataParallel(model())
    net.register_comm_hook(None, hook)
    check(train(net, dist.get_rank()).parameters())


@pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")
@world(2, backend=None)
def test_fsdp2_over_a_group_of_a_mesh(tmp_path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("shm", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    try:
        mesh = Mesh.build(MeshSpec(data_shard=2))
        net = model()
        fully_shard(net, mesh=DeviceMesh.from_group(mesh["data"].pg, "cpu"))
        check([p.full_tensor() for p in train(net, rank).parameters()])
    finally:
        dist.destroy_process_group()
