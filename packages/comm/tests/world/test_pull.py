"""Rows that are pulled are the rows that were published, for as long as they may be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_comm import all_to_all_counts, differentiable, self_group, world_group
from ds_comm.groups import Group
from ds_comm.shm.shm_window import ShmWindow
from ds_config.errors import CommError
from ds_testing import world


def rows_of(rank: int, step: int, rows: int = 50, width: int = 7) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()


def check(group: Group) -> None:
    window = ShmWindow(group, 50, 7, torch.bfloat16)
    for step in range(5):
        if step == 3:
            window.grow(80)
        window.local[:50].copy_(rows_of(group.rank, step))
        window.publish()
        window.local.fill_(-1)  # the other buffer: nobody pulls from it
        for source in range(group.size):
            index = torch.randint(50, (64,), generator=torch.Generator().manual_seed(step + 7 * group.rank))
            wanted = rows_of(source, step)[index]
            assert torch.equal(window.pull(source, index), wanted)
            out = torch.empty(64, 7, dtype=torch.bfloat16)
            assert window.pull(source, index.int(), out=out) is out
            assert torch.equal(out, wanted)
            assert window.pull(source, index[:0]).shape == (0, 7)
    with pytest.raises(CommError, match="rows 3 to 80 of 80"):
        window.pull(0, torch.tensor([3, 80]))
    with pytest.raises(CommError, match=f"rank {group.size} of {group.size}"):
        window.pull(group.size, torch.tensor([3]))
    window.close()


@world(2)
def test_two_ranks() -> None:
    check(world_group())


@world(3, backend="shm")
def test_three_ranks() -> None:
    check(world_group())


def test_alone() -> None:
    check(self_group())
    ShmWindow(self_group(), 0, 7, torch.float32).publish()


@world(2)
def test_it_is_an_exchange_of_sorted_rows() -> None:
    """What experts do: rows go to the rank of their expert, by pulling or by sending; the same rows in the same order."""
    group, rank = world_group(), dist.get_rank()
    x, to = rows_of(rank, 9), torch.randint(2, (50,), generator=torch.Generator().manual_seed(rank))
    send = torch.bincount(to, minlength=2)
    receive = all_to_all_counts(send)
    sent = differentiable.all_to_all_rows(x[to.argsort(stable=True)], group, send.tolist(), receive.tolist())
    window = ShmWindow(group, 50, 7, torch.bfloat16)
    window.local.copy_(x)
    window.publish()
    every = [torch.randint(2, (50,), generator=torch.Generator().manual_seed(r)) for r in range(2)]
    pulled = torch.cat([window.pull(r, (every[r] == rank).nonzero().view(-1)) for r in range(2)])
    assert torch.equal(pulled, sent)
    dist.barrier()
