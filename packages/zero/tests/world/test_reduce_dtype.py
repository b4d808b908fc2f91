"""In which format gradients travel is a choice and a line of the plan; narrow messages are summed in fp32 and rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import PlanError
from ds_testing import world

SLOW = pytest.mark.slow
CUT = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)


class Scaled(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return (self.weight * x.to(self.weight.dtype)).sum()


def master_after_a_step(stage, value, **options):
    """The weight after one step at rate 1 from 0, so minus the averaged gradient, whose value is that of `value` on this rank."""
    model = Scaled()
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, policy=CUT, **options)
    model(torch.full((64,), value)).backward()
    optimizer.step()
    weight = ds_zero.safe_get_full_fp32_param(model.weight)
    optimizer.close()
    assert (weight == weight[0]).all()
    return -float(weight[0])


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=SLOW), 3])
@world(2)
def test_gradients_travel_in_the_format_that_was_chosen(stage):
    fine = 1.0 + 2.0**-12  # no bf16 number
    assert master_after_a_step(stage, fine) == fine
    assert master_after_a_step(stage, fine, reduce_dtype=torch.bfloat16) == 1.0
    value = 256.0 if dist.get_rank() == 0 else 1.0  # 257 is no bf16 number
    assert master_after_a_step(stage, value, precision="bf16") == 128.0
    assert master_after_a_step(stage, value, precision="bf16", reduce_dtype=torch.float32) == 128.5


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)]
)
@world(4)
def test_narrow_messages_are_summed_in_fp32(stage):
    value = 256.0 if dist.get_rank() == 0 else 1.0  # bf16 sums would stay 256
    assert master_after_a_step(stage, value, precision="bf16") == 260.0 / 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@world(4, backend="gloo")
def test_narrow_messages_are_summed_in_fp32_on_gloo(stage):
    value = 256.0 if dist.get_rank() == 0 else 1.0
    assert master_after_a_step(stage, value, precision="bf16") == 260.0 / 4


def test_the_plan_says_it():
    lines = str(ds_zero.plan(Scaled(), 2, ds_zero.ShardOptions(precision="bf16")))
    assert (
        "gradients travel in bfloat16 (summed in float32 on shm and gloo, in bfloat16 by NCCL), add up in float32"
        in lines
    )
    options = ds_zero.ShardOptions(precision="bf16", reduce_dtype=torch.float32)
    assert "gradients travel in float32, add up in float32" in str(ds_zero.plan(Scaled(), 2, options))
    assert "travel" not in str(ds_zero.plan(Scaled(), 1, options))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn])
def test_other_formats_are_refused(dtype):
    with pytest.raises(PlanError, match="reduce_dtype") as error:
        ds_zero.ShardOptions(reduce_dtype=dtype)
    assert error.value.code == ("config-option" if dtype == "bfloat16" else "precision-reduce")


def test_two_formats_are_refused():
    precision = ds_zero.Precision(reduce=torch.float32)
    assert ds_zero.ShardOptions(precision=precision, reduce_dtype=torch.float32).precision == precision
    with pytest.raises(PlanError, match=r"precision\.reduce is torch\.float32"):
        ds_zero.ShardOptions(precision=precision, reduce_dtype=torch.bfloat16)
