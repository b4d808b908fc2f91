"""Buffers that go round."""

from __future__ import annotations

import torch

from ds_comm.buffer_pool import BufferPool


def test_a_pool_hands_out_what_came_back_and_drops_the_rest():
    pool, cpu = BufferPool(), torch.device("cpu")
    held, idle = pool.take(100, torch.float32, cpu), pool.take(100, torch.float32, cpu)
    assert (pool.fresh, pool.bytes) == (2, 800)
    pool.give(idle)
    assert pool.take(100, torch.float64, cpu) is not idle
    assert pool.take(100, torch.float32, cpu) is idle
    pool.give(held)
    assert (pool.fresh, pool.drop(), pool.bytes) == (3, 400, 1200)
    assert pool.take(100, torch.float32, cpu) is not held


def test_buffers_of_many_sizes_are_as_many_as_are_in_use_at_one_time():
    pool, cpu, sizes = BufferPool(), torch.device("cpu"), [30, 70, 10, 50, 90, 20]
    for _ in range(2):
        for size in sizes:
            held, more = pool.take(size, torch.float32, cpu), pool.take(7, torch.float32, cpu)
            assert (held.numel(), more.numel()) == (size, 7)
            held.fill_(1.0)
            more.fill_(2.0)
            assert held.sum() == size
            pool.give(held)
            pool.give(more)
        known = pool.fresh
    for size in sizes:
        pool.give(pool.take(size, torch.float32, cpu))
    assert pool.fresh == known
    assert pool.bytes <= 2 * 90 * 4
    assert pool.take(0, torch.float32, cpu).numel() == 0
