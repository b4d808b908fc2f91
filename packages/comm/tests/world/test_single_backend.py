"""`single`: torch.distributed among one rank gives what gloo gives there, and DDP and FSDP2 train on it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm.single import SingleProcessGroup
from ds_config.errors import CommError
from ds_testing import world

from .test_shm_backend import everything, on


@world(1, backend=None)
def test_the_whole_api_gives_what_gloo_gives(tmp_path: Path) -> None:
    ours, gloos = on("single", tmp_path, everything), on("gloo", tmp_path, everything)
    assert len(ours) == len(gloos) > 10  # type: ignore[arg-type]
    for mine, theirs in zip(ours, gloos, strict=True):  # type: ignore[call-overload]
        assert torch.equal(mine, theirs)


def steps(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 6), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@world(2)
def test_ddp_and_fsdp_in_a_group_of_one() -> None:
    """Every rank trains a model of its own."""
    rank = dist.get_rank()
    group = ds_comm.self_group("own", rank).pg

    def build() -> nn.Module:
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    plain = steps(build())
    assert steps(DistributedDataParallel(build(), process_group=group)) == plain
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("own",))
    sharded = build()
    fully_shard(sharded, mesh=mesh)
    assert steps(sharded) == pytest.approx(plain, rel=1e-6)


def test_several_ranks_are_refused() -> None:
    with pytest.raises(CommError, match="a group of 2 ranks") as error:
        SingleProcessGroup(dist.HashStore(), 0, 2, timedelta(seconds=1))
    assert error.value.code == "comm-single"


@world(2)
def test_a_message_has_nobody_to_go_to() -> None:
    group = ds_comm.self_group("own", dist.get_rank()).pg
    with pytest.raises(CommError, match="has no other") as error:
        group.send([torch.ones(1)], 0, 0)  # type: ignore[union-attr]
    assert error.value.code == "comm-rank"
