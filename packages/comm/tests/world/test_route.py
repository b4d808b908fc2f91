"""Gathers in two steps: the same elements as flat ones, in whatever order they are waited for."""

from __future__ import annotations

import torch

from ds_comm import destroy_group, world_group
from ds_comm.buffer_pool import BufferPool
from ds_comm.collectives import all_gather_single
from ds_comm.groups import node_groups
from ds_comm.hierarchical import HierarchicalGather
from ds_testing import world


@world(4)
def test_two_steps_equal_one():
    whole, pool = world_group(), BufferPool()
    inside, across = node_groups(whole, 2, ("node", "across"))
    route = HierarchicalGather(inside, across, pool)
    mine = [torch.arange(n, dtype=torch.float32) + 100 * whole.rank for n in (3, 5, 1)]
    for order in ((0, 1, 2), (2, 0, 1)):
        outs = [torch.empty(4 * part.numel()) for part in mine]
        works = [route.gather(out, part, f"unit{i}") for i, (out, part) in enumerate(zip(outs, mine, strict=True))]
        assert [route.waits(work) for work in works] == [False, False, True]  # a later gather pushes the line
        for i in order:
            works[i].wait()
        assert all(work.is_completed() for work in works)
        for out, part in zip(outs, mine, strict=True):
            flat = torch.empty_like(out)
            all_gather_single(flat, part, whole)
            assert torch.equal(out, flat)
    assert pool.fresh == 3  # buffers of the first steps are used again
    for group in (across, inside):
        destroy_group(group)
