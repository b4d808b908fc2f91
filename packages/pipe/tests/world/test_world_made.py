"""Stages of processes that a launcher started, without a process group, lie on all of them."""

import torch.distributed as dist

import ds_comm
from ds_pipe.topology import PipelineGroups, plain_topology
from ds_testing import world


@world(2, backend=None)
def test_stages_make_the_world():
    assert not dist.is_initialized()
    try:
        topology = plain_topology(2)
        assert dist.get_world_size() == 2
        groups = PipelineGroups.build(topology)
        assert groups.pipe.size == 2
    finally:
        ds_comm.destroy_process_group()
