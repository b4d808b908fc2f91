"""Meshes of processes that a launcher started, without a process group, are of all of them."""

import pytest
import torch.distributed as dist

import ds_comm
from ds_comm import Mesh, MeshSpec
from ds_parallel.sequence.hf_attention import SequenceRanks
from ds_testing import world


@pytest.mark.parametrize("make", ["mesh", "sequence"])
@world(2, backend=None)
def test_a_mesh_makes_the_world(make):
    assert not dist.is_initialized()
    try:
        mesh = Mesh.build(MeshSpec(sequence=2)) if make == "mesh" else SequenceRanks(2).mesh
        assert (dist.get_world_size(), mesh["sequence"].size) == (2, 2)
    finally:
        ds_comm.destroy_process_group()
