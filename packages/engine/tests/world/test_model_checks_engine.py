"""What ds-zero cannot shard is refused by `initialize`, which names the key that helps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_engine
from ds_config.errors import PlanError, UnsupportedError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
@world(1)
def test_scripted_modules_are_refused_at_stage_3(stage: int) -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    if stage == 3:
        with pytest.raises(UnsupportedError, match="0 is scripted"):
            ds_engine.initialize(model=net, config=config)
        return
    engine, *_ = ds_engine.initialize(model=net, config=config)
    before = net[0].weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert not torch.equal(net[0].weight, before)
    engine.close()


@STAGES
@world(1)
def test_norms_whose_buffers_stay_wide_name_the_key(stage: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))

    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    with pytest.raises(PlanError, match=r'data_types\.buffer_dtype = "bf16"'):
        ds_engine.initialize(model=make(), config=config)
    engine, *_ = ds_engine.initialize(model=make(), config=config | {"data_types": {"buffer_dtype": "bf16"}})
    engine.backward(engine(torch.randn(4, 3, 8).bfloat16()).sum())
    engine.step()
    engine.close()
