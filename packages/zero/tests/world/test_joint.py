"""Gradients of several units in one message: the same bits as one message each, and fewer of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_comm as comm
import ds_zero
from ds_testing import world
from ds_zero.runtime.joint import Joint

MESSAGES = ("all_to_all_pieces", "reduce_scatter_single", "all_reduce")


def train(bench, stage, limit, monkeypatch, *, steps=3, name="plain"):
    """Parameters after a few steps of two backwards each, and how many messages of gradients were sent."""
    net = bench.model(name)
    policy = ds_zero.UnitPolicy(max_numel=600)
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=stage, policy=policy)
    reducing = optimizer.sharding.runtime.reducing
    if limit:
        reducing.sum_together(reducing.buckets(limit))
    sent = []
    with monkeypatch.context() as patch:
        for call in MESSAGES:
            send = getattr(comm, call)
            patch.setattr(
                comm,
                call,
                lambda *args, send=send, **kwargs: [sent.append(kwargs.get("unit")), send(*args, **kwargs)][1],
            )
        for step in range(steps):
            for micro in range(2):
                bench.loss(net, bench.batch(step, micro, dist.get_rank())).backward()
            optimizer.step()
    units = [unit.spec.name for unit in optimizer.sharding.units]
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    optimizer.close()
    return found, [unit for unit in sent if unit and unit.partition("+")[0] in units]


@pytest.mark.parametrize("anywhere", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_one_message_for_several_units_has_the_same_bits(bench, monkeypatch, stage, anywhere):
    if not anywhere:  # as on a device: gradients are summed by reduce-scatter of an arena
        monkeypatch.setattr("ds_zero.runtime.seat.sends_from_anywhere", lambda group, device: False)
    expected, alone = train(bench, stage, 0, monkeypatch)
    found, together = train(bench, stage, 10**6, monkeypatch)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert len(together) < len(alone)
    assert any("+" in unit for unit in together)


@world(2)
def test_units_that_are_tied_unused_frozen_or_used_twice_keep_their_bucket(bench, monkeypatch):
    for name in ("tied", "unused", "frozen", "reentrant_reused", "mixed"):
        expected, _ = train(bench, 2, 0, monkeypatch, name=name)
        found, _ = train(bench, 2, 10**6, monkeypatch, name=name)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=0, rtol=0, msg=key)


@world(2, backend="shm")
def test_ranks_that_share_memory_send_nothing_together(bench, monkeypatch):
    made = []
    monkeypatch.setattr(Joint, "send", lambda self: made.append(self))
    train(bench, 2, 10**6, monkeypatch, steps=1)
    assert made == []
