"""A checkpoint of processes that a launcher started, without a process group: one checkpoint of all, not one of each."""

import torch
import torch.distributed as dist

import ds_ckpt
import ds_comm
from ds_testing import world


@world(2, backend=None)
def test_saving_makes_the_world(tmp_path):
    assert not dist.is_initialized()
    try:
        ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"param/w": torch.arange(4.0)}), {})
        assert dist.get_world_size() == 2
    finally:
        ds_comm.destroy_process_group()
