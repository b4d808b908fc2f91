"""An arena is one memory seen by all ranks; reductions over it are the definition, to the bit."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ds_comm import self_group, world_group
from ds_comm.shm.symmetric_arena import Arena, TensorRequest, arena_refusal
from ds_testing import world


def check(arena: Arena) -> None:
    rank, size, n = arena.rank, arena.size, 1003
    wishes = [
        TensorRequest(n * size, torch.float32, shared=True),
        TensorRequest(n * size, torch.bfloat16),
        TensorRequest(0, torch.float32),
    ]
    (full,), grads, nothing = arena.allocate(wishes)
    assert len(grads) == len(nothing) == size
    assert not full.any()
    for step in range(3):
        grads[rank].copy_(torch.randn(n * size, generator=torch.Generator().manual_seed(10 * step + rank)))
        out = torch.empty(n, dtype=torch.bfloat16)
        arena.reduce_scatter(out, grads)
        every = [
            torch.randn(n * size, generator=torch.Generator().manual_seed(10 * step + r)).bfloat16()
            for r in range(size)
        ]
        total = every[0].float()
        for other in every[1:]:
            total = total + other.float()
        assert torch.equal(out, total.bfloat16()[rank * n : (rank + 1) * n])
        full[rank * n : (rank + 1) * n] = rank + step
        copy = torch.empty(size, n)
        arena.all_gather(copy, full)
        assert torch.equal(full, (torch.arange(size) + step).repeat_interleave(n).float())
        assert torch.equal(copy.view(-1), full)
        arena.all_gather(halves := torch.empty(n * size, dtype=torch.bfloat16), grads[0])
        assert torch.equal(halves, grads[0])
        arena.barrier()
    arena.close()
    assert full[0] == 2.0  # tensors outlive the arena


@world(2)
def test_two_ranks() -> None:
    check(Arena(world_group()))


@world(3)
def test_three_ranks_on_two_cores() -> None:
    check(Arena(world_group()))


def test_a_group_of_one_takes_the_same_path() -> None:
    check(Arena(self_group()))


@world(2)
def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        arena = Arena(world_group())
        arena.allocate([TensorRequest(10, torch.float32, shared=True)])
        arena.close()
    dist.barrier()
    assert len(os.listdir("/proc/self/fd")) <= before


@world(2)
def test_ranks_that_cannot_share_memory_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_comm import node_topology as module

    assert arena_refusal(world_group()) == ""
    monkeypatch.setattr(module, "pid_namespace_id", lambda: f"host {dist.get_rank()}")
    assert arena_refusal(world_group()) == "the ranks are on 2 hosts"
    with pytest.raises(Exception, match="cannot share memory: the ranks are on 2 hosts"):
        Arena(world_group())
