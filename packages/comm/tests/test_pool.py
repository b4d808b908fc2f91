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
