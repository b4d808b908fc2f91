"""Experts of processes that a launcher started, without a process group, lie on all of them."""

import torch.distributed as dist

import ds_comm
from ds_moe.expert_groups import make_places
from ds_testing import world


@world(2, backend=None)
def test_placing_makes_the_world():
    assert not dist.is_initialized()
    try:
        places = make_places(2)
        assert (dist.get_world_size(), places.expert.size) == (2, 2)
        places.close()
    finally:
        ds_comm.destroy_process_group()
