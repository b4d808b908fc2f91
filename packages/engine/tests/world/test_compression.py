"""Compression by configuration: engines at every stage equal a plain loop; a run resumes in the middle of a schedule on another stage."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_comm
import ds_engine
from ds_compress import compression_scheduler, init_compression, is_compressed, redundancy_clean
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world


def technique(params, modules, related=None, **shared):
    group = {"params": params, "modules": modules, **({"related_modules": related} if related else {})}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"some": group}}


SECTION = {
    "weight_quantization": technique(
        {"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["*"], schedule_offset=1, quantize_groups=4),
    "activation_quantization": technique({"bits": 8}, ["*"], schedule_offset=2, range_calibration="static"),
    "sparse_pruning": technique({"dense_ratio": 0.6}, ["^2$"], schedule_offset=3, method="topk"),
    "row_pruning": technique({"dense_ratio": 0.5}, ["^0$"], [["^2$"]], schedule_offset=2),
}  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "adam_w_mode": False}},
        "zero_optimization": {"stage": stage}, "data_types": {}, "compression_training": SECTION, **more,
    }  # fmt: skip


def batch(step, rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def wanted(steps):
    net = init_compression(model(), {"compression_training": SECTION})
    schedule, losses = compression_scheduler(net), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(steps):
        loss = net(torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, redundancy_clean(net)


@world(2)
def test_every_stage_equals_a_plain_loop_and_resumes_on_another(tmp_path):
    losses, cleaned = wanted(7)
    for stage in range(4):
        net = model()
        engine, *_ = ds_engine.initialize(model=net, config=config(stage))
        assert train(engine, 0, 4) == pytest.approx(losses[:4], rel=1e-5)
        engine.save_checkpoint(tmp_path, tag=f"stage{stage}")
        other, *_ = ds_engine.initialize(model=(again := model()), config=config(3 - stage))
        other.load_checkpoint(tmp_path, tag=f"stage{stage}")
        assert train(other, 4, 7) == pytest.approx(losses[4:], rel=1e-5)
        assert again[0].compression.bits == cleaned_bits(7)
        engine.close()
        other.close()
        redundancy_clean(again)
        assert again[0].weight.shape == cleaned[0].weight.shape == (8, 8)
        assert again[2].weight.shape == (8, 8)
        torch.testing.assert_close(again[0].weight, cleaned[0].weight, atol=1e-4, rtol=1e-4)


def cleaned_bits(steps):
    net = init_compression(model(), {"compression_training": SECTION})
    schedule = compression_scheduler(net)
    for _ in range(steps):
        schedule.step()
    return net[0].compression.bits


@world(1)
def test_what_an_engine_cannot_do_is_refused_by_name():
    def refused(error, text, **parts):
        with pytest.raises(error, match=text):
            ds_engine.initialize(**{"model": model(), "config": config(0), **parts})

    reduction = {"layer_reduction": {"enabled": True, "module_name_prefix": "0", "teacher_layer": [0]}}
    refused(PlanError, "no layers of a teacher", config=config(0, compression_training=reduction))
    refused(PlanError, "learnt scores", model_parameters=(net := model()).parameters(), model=net)
    refused(PlanError, "both quantise weights", config=config(0, quantize_training={"enabled": True}))
    curved = {"enabled": True, "eigenvalue": {"enabled": True}}
    refused(UnsupportedError, "second derivatives", config=config(0, compression_training={}, quantize_training=curved))


class Stack(nn.Module):
    """A feed-forward that ds-parallel cuts, and a head that it does not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(x + self.body(x)))


@world(2)
def test_a_layer_that_is_cut_is_refused_and_those_beside_it_are_compressed():
    torch.manual_seed(0)
    whole = Stack()
    net = copy.deepcopy(whole)
    plan = make_tensor_plan(facts_of(net), TensorOptions(degree=2))
    parallelize_model(net, plan, ds_comm.world_group())
    assert net.body[0].weight.shape == (8, 8)
    params = {"start_bits": 4, "target_bits": 4}
    with pytest.raises(UnsupportedError, match=r"body\.0 is cut over 2 ranks"):
        init_compression(net, {"compression_training": {"weight_quantization": technique(params, ["*"])}})
    assert not is_compressed(net)
    section = {"compression_training": {"weight_quantization": technique(params, ["head"], quantize_groups=5)}}
    x = torch.randn(3, 8)
    wanted, plain = init_compression(whole, section)(x), net(x)
    torch.testing.assert_close(init_compression(net, section)(x), wanted, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(plain, wanted, atol=1e-3)


@world(1)
def test_quantize_training_is_weight_quantization_of_all_layers():
    engine, *_ = ds_engine.initialize(model=(net := model()), config=config(0, compression_training={}, quantize_training={
        "enabled": True, "quantize-algo": {"q_type": "asymmetric"}, "quantize_bits": {"start_bits": 8, "target_bits": 6},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1}}))  # fmt: skip
    told = []
    for step in range(5):
        train(engine, step, step + 1)
        told.append(net[0].compression.bits.bits)
    assert told == [8, 7, 6, 6, 6]
    assert "weight quantization from step 1 on" in str(engine.plan)
    engine.close()
