"""The seats hold: a tier that keeps masters as bf16 in host memory of its own is this file, and nothing in ds-zero knows of it."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_zero
from ds_config.errors import PlanError
from ds_testing import world
from ds_zero.offload.state_stores import TIERS, OptimizerStateStore


class Narrow(OptimizerStateStore):
    """Between updates the shard is bf16, elsewhere, and its fp32 memory is given back."""

    resident = False
    alone = True
    most = now = 0

    def __init__(self, unit):
        super().__init__(unit)
        self.kept = None

    @staticmethod
    def planned(found):
        return replace(found, shard=0)

    def fetch(self):
        shard = self.unit.shard
        if self.kept is not None:
            shard.untyped_storage().resize_(shard.nbytes)
            shard.data.copy_(self.kept)
            self.kept = None
            Narrow.now += 1
            Narrow.most = max(Narrow.most, Narrow.now)

    def store(self):
        if self.kept is None:
            self.kept = self.unit.shard.detach().to("cpu", torch.bfloat16)
            self.unit.shard.untyped_storage().resize_(0)
            Narrow.now -= 1


def rounded(params):
    with torch.no_grad():
        for param in params:
            param.copy_(param.to(torch.bfloat16))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("memory", ["private", "shared"])
@world(2)
def test_masters_kept_elsewhere_in_bf16(bench, stage, memory):
    expected = bench.model("plain", torch.float64).float()
    truth = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    net = bench.model("plain")
    rounded(net.parameters())
    rounded(expected.parameters())
    with mock.patch.dict(TIERS, {"narrow": Narrow}):
        Narrow.now = Narrow.most = 0
        optimizer = ds_zero.shard(
            net, bench.adamw(net), stage=stage, memory=memory, offload_optimizer="narrow",
            policy=ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40),
        )  # fmt: skip
        units = optimizer.sharding.units
        Narrow.now = Narrow.most = 0
        for step in range(3):
            bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(2):
                (bench.loss(expected, bench.batch(step, 0, rank)) / 2).backward()
            truth.step()
            truth.zero_grad()
            rounded(expected.parameters())
        assert Narrow.most == 1 < len(units)  # one at a time
        assert all(u.bytes["shard"] == u.plan.bytes.shard == 0 for u in units)
        whole = [ds_zero.safe_get_full_fp32_param(p) for p in net.parameters()]
        for a, b in zip(whole, expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
        assert len(optimizer.shards()) >= len(units)
        optimizer.refresh()
        assert all(u.bytes["shard"] == 0 for u in units)
        optimizer.close()


@world(1)
def test_a_tier_for_some_units_and_one_that_there_is_not():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="there is no tier 'moon'"):
        ds_zero.shard(net, inner, offload_optimizer="moon")
    with mock.patch.dict(TIERS, {"narrow": Narrow}):
        optimizer = ds_zero.shard(
            net, inner, stage=1, policy=ds_zero.UnitSizePolicy(max_numel=80),
            offload_optimizer=lambda spec: "narrow" if "1.weight" in spec.shapes else "device",
        )  # fmt: skip
        assert [u.plan.offload_optimizer for u in optimizer.sharding.units] == ["device", "narrow"]
        optimizer.close()
