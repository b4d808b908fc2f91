"""A twin has the same ranks and carries the traffic of another thread."""

import threading

import torch
import torch.distributed as dist

from ds_comm import all_gather_single, all_reduce, drop_group, new_group, single_group, twin_group
from ds_testing import world


@world(3)
def test_a_twin_is_made_by_its_members_alone_and_does_not_mix_with_them():
    inner = new_group([0, 2], "inner")
    if inner is not None:
        twin = twin_group(inner, "behind")
        assert (twin.ranks, twin.rank, twin.name) == (inner.ranks, inner.rank, "behind")
        assert twin.pg is not inner.pg
        rows = torch.zeros(2, dtype=torch.int64)

        def behind():
            all_gather_single(rows, torch.tensor([dist.get_rank()]), twin)

        # Rank 0 begins with the twin, rank 2 with the group: on one group this would not end.
        thread = threading.Thread(target=behind)
        if inner.rank == 0:
            thread.start()
        total = torch.ones(1)
        all_reduce(total, group=inner)
        if inner.rank == 1:
            thread.start()
        thread.join(30)
        assert (total.item(), rows.tolist()) == (2, [0, 2])
        drop_group(twin)
    dist.barrier()


def test_a_group_of_one_is_its_own_twin():
    alone = single_group()
    assert twin_group(alone, "behind") is alone
    drop_group(alone)
