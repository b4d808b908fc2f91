"""Groups of a mesh, and torch's DeviceMesh in both directions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ds_comm
from ds_comm import Mesh, MeshSpec
from ds_config.errors import CommError, PlanError, set_place
from ds_testing import world


def sum_over(group: ds_comm.Group) -> float:
    x = torch.tensor([float(10 ** dist.get_rank())])
    ds_comm.all_reduce(x, group=group)
    return x.item()


@world(4)
def test_groups_sum_over_their_ranks() -> None:
    spec = MeshSpec(data_shard=2, tensor=2, expert=2)
    mesh = Mesh.build(spec)
    try:
        for name, group in mesh.items():
            assert group.name == name
            assert group.ranks == spec.group_of(name, dist.get_rank())
            assert sum_over(group) == sum(10**rank for rank in group.ranks)
        assert mesh["data"].pg is mesh["data_shard"].pg
        assert mesh["world"].pg is dist.group.WORLD
        with pytest.raises(PlanError, match=rf"^\[rank {dist.get_rank()}/4 ") as caught:
            MeshSpec.fit(3, tensor=2)
        assert caught.value.code == "mesh-size"
    finally:
        set_place("")


@world(4)
def test_a_device_mesh_has_the_same_groups() -> None:
    mesh = Mesh.build(MeshSpec(pipe=2, data_shard=2))
    set_place("")
    device_mesh = mesh.device_mesh("cpu")
    assert device_mesh.mesh_dim_names == ("pipe", "data_shard")
    assert device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert device_mesh.get_group("pipe") is mesh["pipe"].pg
    assert tuple(device_mesh.get_coordinate()) == divmod(dist.get_rank(), 2)
    flat = Mesh.build(MeshSpec(data_shard=4)).device_mesh("cpu")
    set_place("")
    assert flat.mesh_dim_names == ("data_shard",)
    assert flat.size() == 4


@world(4)
def test_a_mesh_of_a_device_mesh_uses_its_groups() -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_replicate", "tensor"))
    mesh = Mesh.from_device_mesh(device_mesh)
    assert mesh.spec == MeshSpec(data_replicate=2, tensor=2)
    assert mesh["tensor"].pg is device_mesh.get_group("tensor")
    assert mesh["data"].pg is device_mesh.get_group("data_replicate")
    for name, group in mesh.items():
        assert sum_over(group) == sum(10**rank for rank in mesh.spec.group_of(name, dist.get_rank()))


@world(2)
def test_a_device_mesh_without_a_counterpart_is_refused() -> None:
    with pytest.raises(CommError, match="no counterpart") as caught:
        Mesh.from_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    assert caught.value.code == "mesh-layout"


@world(1)
def test_one_rank_with_a_process_group() -> None:
    mesh = Mesh.build(MeshSpec())
    assert mesh["world"].pg is mesh["tensor"].pg is dist.group.WORLD
    assert mesh.device_mesh("cpu").size() == 1
    x = torch.ones(2)
    ds_comm.all_reduce(x)
    assert x.tolist() == [1, 1]
