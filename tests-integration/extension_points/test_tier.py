"""A tier: masters are in a list between updates. This file and one row; nothing in ds-zero knows of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import torch

import ds_zero
from ds_testing import world
from ds_zero.layout.units import UnitBytes
from ds_zero.offload.state_stores import TIERS, OptimizerStateStore


class Elsewhere(OptimizerStateStore):
    """Between updates the shard has no memory of its own."""

    resident = False
    alone = True
    kept: ClassVar[dict[int, torch.Tensor]] = {}

    @staticmethod
    def planned(found: UnitBytes) -> UnitBytes:
        return replace(found, shard=0)

    def fetch(self) -> None:
        shard = self.unit.shard
        if self.unit.number in self.kept:
            shard.untyped_storage().resize_(shard.nbytes)
            shard.data.copy_(self.kept.pop(self.unit.number))

    def store(self) -> None:
        if self.unit.number not in self.kept:
            self.kept[self.unit.number] = self.unit.shard.detach().clone()
            self.unit.shard.untyped_storage().resize_(0)


@world(1)
def test_training_with_it_is_the_same_to_the_bit():
    expected = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, data = copy.deepcopy(expected), torch.randn(3, 2, 4)
    truth = torch.optim.Adam(expected.parameters())
    with mock.patch.dict(TIERS, {"elsewhere": Elsewhere}):
        inner = torch.optim.Adam(model.parameters())
        policy = ds_zero.UnitSizePolicy(max_numel=20)
        optimizer = ds_zero.shard(model, inner, stage=1, offload_optimizer="elsewhere", policy=policy)
        for batch in data:
            for net, update in ((expected, truth), (model, optimizer)):
                net(batch).sum().backward()
                update.step()
                update.zero_grad()
            assert len(Elsewhere.kept) == len(optimizer.sharding.units) == 2
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))
