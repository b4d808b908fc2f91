"""The mesh as integers: degrees, groups, errors. What needs process groups is in world/test_mesh.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.mesh import AXES, GROUPS, Mesh, MeshSpec
from ds_config.errors import CommError, PlanError

degrees = st.integers(1, 3)
specs = st.builds(
    MeshSpec, pipe=degrees, data_replicate=degrees, data_shard=degrees, sequence=degrees, tensor=degrees
).filter(lambda spec: spec.world_size <= 48)


@given(specs, st.sampled_from(sorted(GROUPS)))
def test_every_group_partitions_the_world_in_one_order(spec: MeshSpec, name: str) -> None:
    groups = spec.groups(name)
    assert sorted(itertools.chain(*groups)) == list(range(spec.world_size))
    assert groups == sorted(groups)
    for rank in range(spec.world_size):
        assert rank in spec.group_of(name, rank)


@given(specs, st.data())
def test_experts_are_another_view_of_the_same_ranks(spec: MeshSpec, data: st.DataObject) -> None:
    block = spec.data * spec.sequence
    expert = data.draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
    spec = MeshSpec(spec.pipe, spec.data_replicate, spec.data_shard, spec.sequence, spec.tensor, expert)
    assert spec.expert * spec.expert_data == block
    for rank in range(spec.world_size):
        at = spec.coordinate(rank)
        assert spec.expert_grid.rank(**{axis: at[axis] for axis in spec.expert_grid.axes}) == rank
        together = set(spec.group_of("expert", rank)) | set(spec.group_of("expert_data", rank))
        assert together <= set(spec.group_of("gradient", rank))
        assert len(spec.group_of("expert", rank)) == expert


@given(specs)
def test_filter_match_takes_all_axes(spec: MeshSpec) -> None:
    for rank in range(spec.world_size):
        assert spec.filter_match(**spec.coordinate(rank)) == [rank]


def test_neighbours_talk_most() -> None:
    spec = MeshSpec(pipe=2, data_shard=2, tensor=2, expert=2)
    assert spec.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert spec.groups("data_shard") == spec.groups("expert") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert spec.groups("pipe") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert spec.groups("model") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert spec.groups("world") == [tuple(range(8))]


def test_data_shard_is_inferred() -> None:
    assert MeshSpec.fit(8, tensor=2) == MeshSpec(data_shard=4, tensor=2)
    assert MeshSpec.fit(8, data_shard=2, pipe=4) == MeshSpec(pipe=4, data_shard=2)
    assert MeshSpec.fit(1) == MeshSpec()
    assert MeshSpec.fit(8, expert=4).expert_data == 2


def test_degrees_that_do_not_multiply_say_what_to_set() -> None:
    with pytest.raises(PlanError) as caught:
        MeshSpec.fit(8, data_shard=4, pipe=2, tensor=2)
    assert caught.value.code == "mesh-size"
    assert "pipe 2 x data_shard 4 x tensor 2 = 16, world size 8" in str(caught.value)
    assert "Set mesh.data_shard = 2" in caught.value.fix


def test_degrees_that_no_data_axis_can_mend() -> None:
    with pytest.raises(PlanError, match="tensor 3 = 3, world size 8") as caught:
        MeshSpec.fit(8, tensor=3)
    assert "multiple of 3" in caught.value.fix


def test_experts_may_be_cut_over_tensor_ranks_too() -> None:
    spec = MeshSpec(data_shard=2, tensor=4, expert=4)
    assert (spec.experts_cross_tensor, spec.expert_data) == (True, 2)
    assert spec.groups("expert") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert spec.groups("expert_data") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_experts_must_divide_the_ranks_that_share_them() -> None:
    with pytest.raises(PlanError, match=r"mesh\.expert 3 does not divide") as caught:
        MeshSpec(data_shard=4, expert=3)
    assert caught.value.code == "mesh-expert"


@pytest.mark.parametrize("axis", [*AXES, "expert"])
def test_degrees_are_at_least_one(axis: str) -> None:
    with pytest.raises(PlanError, match=f"{axis} 0"):
        MeshSpec(**{axis: 0})


def test_describe_names_the_place() -> None:
    assert MeshSpec(pipe=2, data_shard=4).describe(5) == "rank 5/8 pipe=1 data_shard=1"
    assert MeshSpec().describe(0) == "rank 0/1"


def test_a_world_of_one_has_every_group_and_no_process_group() -> None:
    mesh = Mesh.build(MeshSpec())
    assert set(mesh) == set(GROUPS)
    assert all(group.size == 1 and group.pg is None for group in mesh.values())
    with pytest.raises(KeyError, match="no group 'dp'"):
        mesh["dp"]
    with pytest.raises(CommError, match="world of one"):
        mesh.device_mesh("cpu")


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    with pytest.raises(PlanError, match="world size 1"):
        Mesh.build(MeshSpec(data_shard=2))
