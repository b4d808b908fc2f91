"""A mesh of thousands of ranks makes the groups of one rank, not all groups of the world."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ds_comm.groups
from ds_comm import Mesh, MeshSpec
from ds_comm.mesh import GROUPS
from ds_config.errors import set_place


@pytest.mark.parametrize(
    "spec", [MeshSpec(pipe=8, data_replicate=4, data_shard=16, tensor=8), MeshSpec(data_shard=1024, tensor=4)]
)
def test_one_group_a_name_at_most(spec, monkeypatch):
    """It made 512 groups along `tensor` alone, each of which all ranks of the world take part in."""
    made, named = [], ds_comm.groups.named_group

    def counted(ranks, *args, **kwargs):
        made.append(tuple(ranks))
        return named(ranks, *args, **kwargs)

    monkeypatch.setattr(ds_comm.groups, "named_group", counted)
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: pytest.fail("every rank of the world takes part"))
    rank = 1234
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4096)
    try:
        mesh = Mesh.build(spec)
        assert {name: group.ranks for name, group in mesh.items()} == {
            name: spec.group_of(name, rank) for name in GROUPS
        }
        assert len(made) == len(set(made)) <= len(GROUPS)
        assert all(rank in ranks for ranks in made)
    finally:
        set_place("")
        dist.destroy_process_group()
