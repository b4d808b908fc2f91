"""A group that only its members make waits for no other rank, also where torch would split the communicator of a bound device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ds_comm
from ds_testing import world


@world(3)
def test_members_make_it_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(c10d, "_get_split_source", lambda pg: asked.append(pg))
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    try:
        if dist.get_rank() < 2:  # the third rank does not come
            group = ds_comm.new_local_group((0, 1), "part")
            value = torch.ones(2)
            ds_comm.all_reduce(value, group=group)
            assert value.tolist() == [2, 2]
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        assert not asked  # it is what waits for all ranks of the world
    finally:
        dist.group.WORLD.bound_device_id = None
