"""Numbers by which ranks wait for each other: what was written before is there, and what they stand for is compared."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm.groups import Group
from ds_comm.node_topology import neighbours
from ds_comm.shm.shm_sequence import ShmSequence
from ds_config.errors import CommError
from ds_ops.shm_collectives import SharedSegment
from ds_testing import world


def made(group: Group, limit_s: float = 30.0) -> tuple[ShmSequence, torch.Tensor]:
    """A tally, and a tensor with a word for each rank behind it."""
    pids = [one.pid for one in neighbours(group)]
    nbytes = ShmSequence.nbytes_for(group.size) + 4096
    mine = SharedSegment(nbytes) if group.rank == 0 else None
    token = ds_comm.broadcast_json(mine.token if mine else "", group)
    segment = mine or SharedSegment.attach(token, nbytes)
    words = segment.tensor(group.size, torch.int64, nbytes - 4096)
    tally = ShmSequence(segment, 0, group, pids, limit_s)
    dist.barrier() if group.size > 1 else None
    return tally, words


@world(3)
def test_what_was_written_before_is_seen() -> None:
    group = ds_comm.world_group()
    tally, words = made(group)
    for step in range(300):  # more than meanings are kept for
        words[group.rank] = step
        number = tally.advance(f"step {step}")
        assert number == tally.value == 2 * step + 1
        tally.wait(number, f"step {step}")
        assert words.tolist() == [step] * 3
        tally.wait(tally.advance("read"), "read")


@world(2)
def test_ranks_that_mean_different_things_are_told() -> None:
    group = ds_comm.world_group()
    tally, _ = made(group)
    tally.wait(tally.advance("same"), "same")
    what = ("gather of layers.0", "edit of layers.0")[group.rank]
    number = tally.advance(what)
    with pytest.raises(
        CommError, match=rf"came to post\[{what}\] #2 .* and rank {1 - group.rank} with something else"
    ) as caught:
        tally.wait(number, what)
    assert caught.value.code == "comm-mismatch"
    dist.barrier()


@world(2)
def test_one_who_does_not_come_is_named() -> None:
    group = ds_comm.world_group()
    tally, _ = made(group, limit_s=0.2)
    if group.rank == 0:
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"post\[layers.0\] #1 of group 'world': rank 1 did not come") as caught:
            tally.wait(tally.advance("layers.0"), "layers.0")
        assert caught.value.code == "comm-timeout"
        assert time.monotonic() - begun < 60
    dist.barrier()


def test_alone_nobody_is_waited_for() -> None:
    tally, _ = made(ds_comm.self_group())
    assert tally.advance("x") == 1
    assert tally.reached(1)
    tally.wait(1)
