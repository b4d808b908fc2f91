"""A DeepSpeed configuration that offloads trains to the same bits, and its checkpoints go on in any tier."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import ds_engine
from ds_accel import ProcessMemory
from ds_config.errors import PlanError
from ds_engine import Engine
from ds_testing import world
from ds_zero import safe_get_full_optimizer_state, safe_set_full_fp32_param
from ds_zero.runtime import sharded_model
from ds_zero.update.overlap_plan import OverlapLedger, OverlapState

WIDTH = 24


class Model(nn.Module):
    """Forward is the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.last(x) - y).square().mean()


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Samples (x, y)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(64, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True).cos()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def start(stage: int, **changes: Any) -> Engine:
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 12}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 700, "param_persistence_threshold": 30, **changes.pop("zero", {})
        },
    }  # fmt: skip
    return ds_engine.initialize(model=Model(), config={**config, **changes}, training_data=Data())[0]


def values(engine: Engine) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in engine.full_state_dict(torch.float32).items()}
    for name, param in engine.module.named_parameters():
        state = safe_get_full_optimizer_state(param, "exp_avg_sq")
        assert state is not None
        found[f"{name}/exp_avg_sq"] = state.clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


CPU = {"device": "cpu"}


def places(folder: str, stage: int) -> list[dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    found: list[dict[str, Any]] = [
        {"offload_optimizer": CPU},
        {"offload_optimizer": {**CPU, "ratio": 0.5}},
        {"offload_optimizer": nvme},
    ]
    if stage == 3:
        found += [
            {"offload_optimizer": CPU, "offload_param": CPU},
            {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}},
            {"offload_param": {**nvme, "max_in_cpu": 400}},
        ]
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@world(2)
def test_the_same_bits_and_checkpoints_between_tiers(tmp_path: Any, stage: int, precision: str) -> None:
    formats = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    cast = (lambda b: [t.bfloat16() for t in b]) if precision == "bf16" else (lambda b: b)

    def run(engine: Engine, steps: int) -> None:
        stream = iter(engine.training_dataloader)
        for _ in range(steps):
            engine.train_batch(iter([cast(next(stream)), cast(next(stream))]))

    plain = start(stage, **formats)
    run(plain, 2)
    plain.save_checkpoint(str(tmp_path / "plain"))
    run(plain, 2)
    expected = values(plain)
    plain.close()
    for number, place in enumerate(places(str(tmp_path / "disk"), stage)):
        engine = start(stage, zero=place, **formats)
        assert "offload" in engine.plan.rows()
        run(engine, 2)
        engine.save_checkpoint(str(tmp_path / str(number)))
        filed = [u for u in engine.sharding.units if str(u.plan.offload_optimizer) == "file"]
        assert all(u.shard.untyped_storage().nbytes() == 0 for u in filed)  # what was saved is not kept in memory
        run(engine, 2)
        same(values(engine), expected)
        engine.close()
        if number % 2:
            other = start(stage, zero=place, **formats)  # from the device into this tier, and back
            other.load_checkpoint(str(tmp_path / "plain"))
        else:
            other = start(stage, **formats)
            other.load_checkpoint(str(tmp_path / str(number)))
        run(other, 2)
        same(values(other), expected)
        other.close()
    dist.barrier()
    assert not any(files for _, _, files in os.walk(tmp_path / "disk"))


@pytest.mark.parametrize("stage", [0, 3])
@world(1)
def test_one_rank_offloads_too(tmp_path: Any, stage: int) -> None:
    results = []
    found = [{}, *places(str(tmp_path), stage)]
    for place in found:
        engine = start(stage, zero=place, train_batch_size=4)
        stream = iter(engine.training_dataloader)
        for step in range(3):
            engine.train_batch(stream)
            if step == 1:
                weight = engine.module.last.weight
                safe_set_full_fp32_param(weight, torch.full(tuple(weight.shape), 0.1))
        results.append(values(engine))
        engine.close()
    for result in results[1:]:
        same(result, results[0])


@world(2)
def test_what_cannot_be_is_refused_with_the_plan() -> None:
    for zero, code in (
        ({"offload_param": CPU}, "offload-stage"),
        ({"offload_optimizer": {"device": "nvme"}}, "offload-placement"),
        ({"offload_optimizer": {"super_offload": True}}, "zero-early"),
        ({"offload_optimizer": {**CPU, "super_offload": True, "cpuadam_cores_perc": 0}}, "zero-early"),
        ({"zenflow": {"overlap_step": True}}, "zero-early"),
        ({"zenflow": {"overlap_step": True, "pt_reserved_cores_perc": 1.0}, "offload_optimizer": CPU}, "zero-early"),
    ):
        with pytest.raises(PlanError) as caught:
            start(2, zero=zero)
        assert caught.value.code == code
    for kind in ("Lamb", "Muon", "SGD", "OneBitAdam"):
        early = {"offload_optimizer": {**CPU, "super_offload": True}}
        with pytest.raises(PlanError, match=f"super_offload with optimizer {kind}"):
            start(2, zero=early, optimizer={"type": kind, "params": {"lr": 0.02}})
    few = ProcessMemory(0, 0, 0, 1 << 10 if dist.get_rank() == 1 else 1 << 40, 1 << 40)
    with mock.patch.object(sharded_model, "host_memory", return_value=few), pytest.raises(PlanError) as caught:
        start(2, zero={"offload_optimizer": CPU})
    assert caught.value.code == "offload-host-memory"
    assert "units on 2 ranks" in caught.value.message


@world(1)
def test_the_plan_says_what_is_where_and_what_moves(tmp_path: Any) -> None:
    engine = start(
        3,
        zero={"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": CPU},
        train_batch_size=4,
    )
    row = engine.plan.rows()["offload"]
    assert row.startswith("optimizer state in file; parameters in host; ")
    for said in ("of host memory", "of files", "of gradients there", "reads and writes"):
        assert said in row
    assert engine.plan.memory.file_bytes > 0
    engine.close()


EARLY = {"offload_optimizer": {**CPU, "super_offload": True}}


def patient(engine: Engine) -> OverlapLedger:
    """A step begins when the thread has nothing left to do."""
    ahead = engine.optimizer.ahead  # type: ignore[union-attr]
    finish = ahead.finish

    def waits() -> BaseException | None:
        end = time.monotonic() + 150
        while any(
            ahead.ledger.state(unit) in (OverlapState.WAITING, OverlapState.WRITING) for unit in ahead.ledger.busy
        ):
            assert time.monotonic() < end
            time.sleep(1e-4)
        return finish()

    ahead.finish = waits  # type: ignore[method-assign]
    return ahead.ledger


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("section", ["super_offload", "overlap_step"])
@world(2)
def test_updates_begin_during_backward_with_the_same_bits(tmp_path: Any, stage: int, section: str) -> None:
    """Also where checkpoints are copied behind the next backward, and between the microbatches of a step."""
    late: dict[str, Any] = {"offload_optimizer": CPU}
    early = EARLY
    if section == "overlap_step":
        late, early = {**ZEN, **late}, {**late, "zenflow": {**ZEN["zenflow"], "overlap_step": True}}
    changes = {"gradient_clipping": 0.0, "checkpoint": {"saving": {"asynchronous": True}}}
    found = []
    for name, zero in (("late", late), ("early", early)):
        engine = start(stage, zero=zero, **changes)
        ledger = patient(engine)
        assert ("begin during backward" in engine.plan.rows()["offload"]) == (name == "early")
        for step in range(8):
            engine.train_batch()
            if step % 2:
                engine.save_checkpoint(str(tmp_path / name))
        engine.checkpointer.wait()
        assert (ledger.retained > 0) == (name == "early")
        found.append(values(engine))
        other = start(stage, zero=late, **changes)
        other.load_checkpoint(str(tmp_path / name))
        found.append(values(other))
        engine.close()
        other.close()
    for one in found[1:]:
        same(one, found[0])


@world(1)
def test_the_plan_says_what_begins_during_backward(tmp_path: Any) -> None:
    engine = start(2, zero=EARLY, train_batch_size=4)
    row = engine.plan.rows()["offload"]
    assert "updates of" in row
    assert "units begin during backward" in row
    assert "keep what they overwrite until the step is known" in row
    engine.close()
    auto = {"zenflow": {"overlap_step": True}, "offload_optimizer": CPU}
    engine = start(2, zero=auto, train_batch_size=4)
    assert "all updates begin after backward" in engine.plan.rows()["importance"]
    assert "during backward" not in engine.plan.rows()["offload"]
    engine.close()


ZEN: dict[str, Any] = {
    "zenflow": {
        "topk_ratio": 0.2,
        "select_strategy": "step",
        "select_interval": 6,
        "update_interval": 3,
        "full_warm_up_rounds": 1,
    }
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_zenflow_is_the_same_at_every_stage_and_tier(stage: int) -> None:
    plain, offloaded = start(1, zero=ZEN), start(stage, zero={**ZEN, "offload_optimizer": CPU})
    assert "20% of the columns" in str(plain.plan)
    for _ in range(8):
        assert plain.train_batch().loss == pytest.approx(offloaded.train_batch().loss, rel=1e-6)
    found, other = plain.full_state_dict(torch.float32), offloaded.full_state_dict(torch.float32)
    for name, value in found.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stages", [(1, 3), (3, 2)])
@world(2)
def test_zenflow_goes_on_from_a_checkpoint_of_another_stage(tmp_path: Any, stages: tuple[int, int]) -> None:
    """In the middle of an interval; and a run without the section goes on from it, too."""
    first = start(stages[0], zero=ZEN)
    for _ in range(5):
        first.train_batch()
    first.save_checkpoint(str(tmp_path))
    second, plain = start(stages[1], zero=ZEN), start(stages[1])
    for engine in (second, plain):
        engine.load_checkpoint(str(tmp_path))
    for _ in range(4):
        first.train_batch()
        second.train_batch()
        assert plain.train_batch().applied
    found = first.full_state_dict(torch.float32)
    for name, value in second.full_state_dict(torch.float32).items():
        torch.testing.assert_close(value, found[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", ["device", "cpu", "nvme"])
@world(1)
def test_a_run_without_zenflow_keeps_nothing_of_it(tmp_path: Any, place: str) -> None:
    first = start(1, zero=ZEN, train_batch_size=4)
    for _ in range(5):
        first.train_batch()
    first.save_checkpoint(str(tmp_path))
    assert any(shard.shard.name.endswith("/zenflow_sum") for shard in first.optimizer.shards())
    first.close()
    device = {"device": place, "nvme_path": str(tmp_path)} if place == "nvme" else {"device": place}
    zero = {} if place == "device" else {"offload_optimizer": device}
    plain = start(1, zero=zero, train_batch_size=4)
    plain.load_checkpoint(str(tmp_path))
    for _ in range(2):
        assert plain.train_batch().applied
    assert {
        shard.shard.name.rpartition("/")[2] for shard in plain.optimizer.shards() if "optim/" in shard.shard.name
    } == {
        "exp_avg",
        "exp_avg_sq",
    }
    plain.close()
