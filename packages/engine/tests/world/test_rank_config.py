"""A rank that was given another configuration is named on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_engine
import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

CHANGES = {
    "optimizer.params.lr": {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}},
    "optimizer.params.weight_decay": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3}}},
    "gradient_clipping": {"gradient_clipping": 0.1},
    "zero_optimization.reduce_bucket_size": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5000}},
    "bf16.enabled": {"bf16": {"enabled": True}},
    "train_batch_size": {"train_batch_size": 8},
}


def configured(**changes):
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    base = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    return base | changes


@pytest.mark.parametrize("key", CHANGES)
@world(2)
def test_another_configuration_on_one_rank_is_refused(key):
    net = nn.Linear(4, 4)
    before = net.weight.clone()
    config = configured(**(CHANGES[key] if dist.get_rank() else {}))
    with pytest.raises(PlanError, match=rf"{key}: .* on rank 0 and .* on rank 1") as error:
        ds_engine.initialize(model=net, config=config)
    assert error.value.code == "engine-ranks-differ"
    assert torch.equal(net.weight, before)


@world(2)
def test_logs_and_folders_of_one_rank_may_differ(tmp_path):
    rank = dist.get_rank()
    config = configured(steps_per_print=rank + 1, csv_monitor={"enabled": rank == 0, "output_path": str(tmp_path)})
    config["zero_optimization"] |= {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / str(rank))}}
    config["flops_profiler"] = {"enabled": True, "output_file": None if rank else str(tmp_path / "flops.txt")}
    engine, *_ = ds_engine.initialize(model=nn.Linear(4, 4), config=config)
    engine.close()


LOGS = {
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "comms_logger": {"enabled": True, "verbose": True},
    "memory_breakdown": True,
    "wall_clock_breakdown": True,
    "activation_checkpointing": {"profile": True},
    "quantize_training": {"quantize_verbose": True},
}


@pytest.mark.parametrize("stage", [0, 3])
@world(2)
def test_one_rank_logs_alone(stage, tmp_path):
    """As scripts do that write `"verbose": rank == 0` into a configuration: the steps are those of ranks that log nothing."""
    weights = []
    for logs in ({}, LOGS if dist.get_rank() == 0 else {}):
        torch.manual_seed(0)
        settings = configured(zero_optimization={"stage": stage}, **logs)
        engine, *_ = ds_engine.initialize(model=nn.Linear(4, 4), config=settings)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        with ds_zero.GatheredParameters(list(engine.module.parameters())):
            weights.append(engine.module.weight.detach().clone())
        engine.close()
    assert torch.equal(*weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_an_optimizer_of_the_caller_is_compared_too(stage):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5 if dist.get_rank() else 0.1)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    with pytest.raises(PlanError, match=r"lr of group 0: 0\.1 on rank 0 and 0\.5 on rank 1"):
        ds_engine.initialize(model=net, optimizer=optimizer, config=config)
