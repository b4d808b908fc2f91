"""Memory that is there while it is used."""

from __future__ import annotations

import torch

from ds_zero import store
from ds_zero.store import Lent, Pool


def paged(monkeypatch, on=True):
    monkeypatch.setattr(store, "HUGE_PAGE_BYTES", 64)
    monkeypatch.setattr(store, "_huge_pages", lambda: on)


def test_lent_memory_is_zero_after_an_idle_time_and_buffers_do_not_overlap(monkeypatch):
    paged(monkeypatch)
    lent = Lent([400, 0, 80])
    first, last = lent.take(0, torch.float32), lent.take(2, torch.float64)
    assert (first.shape, last.shape, lent.take(1, torch.float32)) == ((100,), (10,), None)
    first.fill_(1.0)
    last.fill_(2.0)
    assert first.sum() == 100
    lent.idle()
    assert first.abs().sum() == last.abs().sum() == 0  # new pages; the buffers are usable as before
    first.fill_(3.0)
    assert (first.sum(), last.sum()) == (300, 0)


def test_without_huge_pages_or_for_little_there_is_none(monkeypatch):
    assert Lent([400]).take(0, torch.float32) is None
    paged(monkeypatch, on=False)
    assert Lent([400]).take(0, torch.float32) is None


def test_a_pool_gives_back_the_pages_of_what_nobody_has(monkeypatch):
    paged(monkeypatch)
    pool, cpu = Pool(paged=True), torch.device("cpu")
    held, idle = pool.take(100, torch.float32, cpu).fill_(1.0), pool.take(100, torch.float32, cpu).fill_(2.0)
    pool.give(idle)
    pool.idle()
    assert (held.sum(), idle.sum()) == (100, 0)
    assert pool.take(100, torch.float32, cpu) is idle
    assert pool.fresh == 2
