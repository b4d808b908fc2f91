"""A twin has the same ranks and carries the traffic of another thread."""

import threading

import pytest
import torch
import torch.distributed as dist

from ds_comm import all_gather_single, all_reduce, drop_group, new_group, part_group, single_group, twin_group
from ds_config.errors import CommError
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


@world(4)
def test_members_alone_make_a_group_again_and_again():
    rank = dist.get_rank()
    ranks = ((0, 2), (1, 3))[rank % 2]
    more = part_group((0, 1), "more") if rank < 2 else None  # ranks 0 and 2 have unequal numbers of groups now
    for number in range(3):
        group = part_group(ranks, "part")
        twin = twin_group(group, "twin", None)
        total = torch.tensor([float(number)])
        all_reduce(total, group=twin)
        all_reduce(total, group=group)
        assert (total.item(), group.rank, group.ranks) == (4.0 * number, rank // 2, ranks)
        drop_group(twin)
        drop_group(group)
    if more is not None:
        drop_group(more)
    with pytest.raises(CommError, match="Make it on its members only"):
        part_group([other for other in range(4) if other != rank], "others")


def test_a_group_of_one_is_its_own_twin():
    alone = single_group()
    assert twin_group(alone, "behind") is alone
    drop_group(alone)
