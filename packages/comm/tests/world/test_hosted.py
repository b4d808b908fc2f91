"""Memory that the ranks of a host share: nobody sees what is not his, and sums are in rank order."""

from __future__ import annotations

import torch

import ds_comm as comm
from ds_comm.shm.shm_units import ShmUnitMemory
from ds_ops.reduce import sum_sources
from ds_testing import world


@world(2)
def test_an_edit_of_one_rank_is_seen_by_no_other():
    host = ShmUnitMemory(comm.as_group(None), {0: (5000, torch.float32), 1: (10, torch.float32)}, 0)
    (home, mine), (_, second) = host.full(0), host.full(1)
    if host.rank == 0:
        home[:2500] = 1.0
    else:
        home[2500:] = 2.0
    host.barrier("filled")
    assert mine[:2500].eq(1.0).all()
    assert mine[2500:].eq(2.0).all()
    assert host.edited() == []
    host.barrier("seen")
    if host.rank == 0:
        mine[3000] = 7.0
        assert host.edited() == [0]
        assert home[3000] == 2.0
    else:
        second[0] = 3.0
        assert host.edited() == [1]
    host.barrier("edited")
    assert mine[3000] == (7.0 if host.rank == 0 else 2.0)
    host.forget(0)
    host.forget(1)
    assert host.edited() == []
    assert mine[3000] == 2.0
    assert second[0] == 0.0
    host.barrier("end")


@world(3)
def test_slots_sum_in_rank_order_while_one_rank_is_ahead():
    host = ShmUnitMemory(comm.as_group(None), {}, 4 * 12)
    sums = []
    for step in range(50):
        if (step + host.rank) % 7 == 0:
            torch.randn(200, 200) @ torch.randn(200, 200)
        out = torch.empty(4)
        slot = host.open_slot(12, torch.float32, lambda: None)
        slot.local.fill_(step * 10.0 + host.rank)
        host.post(slot, "part")
        host.wait(slot, "test")
        sum_sources(out, [part[4 * host.rank :][:4] for part in slot.all])
        host.pulled(slot)
        sums.append(out)
    assert [s.tolist() for s in sums] == [[30.0 * step + 3.0] * 4 for step in range(50)]
    host.barrier("end")
