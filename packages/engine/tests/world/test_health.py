"""A NaN on one rank is never silent, whatever the stage; the policy decides what becomes of the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
import ds_monitor
from ds_config.errors import PlanError, TrainingError
from ds_engine import Engine
from ds_monitor import metric_names
from ds_testing import world

BAD = 20


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What ds-engine warns of inside."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_engine").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("ds_engine").removeHandler(handler)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).square().mean()


def engine_of(stage: int, **changes: Any) -> Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    data = list(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    data[BAD][1] = float("nan")
    return ds_engine.initialize(model=Model(), config=config | changes, training_data=data)[0]


def step_of_the_bad_sample(engine: Engine) -> int:
    place = next(
        p for p in range(32) if (loader := engine.training_dataloader) is not None and loader.stream.sample(p) == BAD
    )
    return place // engine.plan.batch.train + 1


def weights(engine: Engine) -> list[Tensor]:
    return [shard.data.clone() for shard in engine.sharding.param_shards()]


@world(2)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_warned_once_with_the_cause(stage: int, clip: float) -> None:
    engine = engine_of(stage, gradient_clipping=clip, on_nonfinite="warn")
    memory = ds_monitor.MemorySink()
    ds_monitor.attach([memory])
    try:
        with warnings() as told:
            bad = step_of_the_bad_sample(engine)
            results = [engine.train_batch() for _ in range(4)]
    finally:
        ds_monitor.detach([memory])
    assert [r.norm == r.norm for r in results] == [step < bad for step in range(1, 5)]
    assert not any(r.skipped for r in results)
    assert len(told) == (1 if engine.mesh.rank == 0 else 0)
    for text in told:
        for word in (f"step {bad}:", str(BAD), "the model: input in forward", "first.weight", "'warn'"):
            assert word in text
        assert text.count("rank ") == 1
    assert sum(r.value for r in memory.records if r.name == metric_names.NONFINITE) >= 1
    engine.close()


@world(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_skipped_steps_leave_the_weights_and_the_run_goes_on(stage: int) -> None:
    engine = engine_of(stage)  # by default, as DeepSpeed's ZeRO does
    bad = step_of_the_bad_sample(engine)
    skipped = [engine.train_batch().skipped for _ in range(4)]
    assert skipped == [step == bad for step in range(1, 5)]
    assert all(bool(w.isfinite().all()) for w in weights(engine))
    assert engine.skipped_steps == 1
    engine.close()


@world(2)
@pytest.mark.parametrize("told", ["unchecked", "warn"])
def test_updates_are_made_where_the_configuration_says_so(told: str) -> None:
    changes = {
        "unchecked": {"bf16": {"enabled": True, "check_grad_overflow": False}, "data_types": {"buffer_dtype": "bf16"}},
        "warn": {"on_nonfinite": "warn", "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }[told]
    engine = engine_of(2, **changes)
    for x in torch.full((2, 2, 4), float("nan")):
        engine.backward(engine(x.to(engine.module.first.weight.dtype)))
        engine.step()
    assert engine.skipped_steps == 0
    assert not all(bool(w.isfinite().all()) for w in weights(engine))
    engine.close()


@world(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_stopped_before_the_update_on_every_rank(stage: int) -> None:
    engine = engine_of(stage, on_nonfinite="stop")
    bad = step_of_the_bad_sample(engine)
    for _ in range(bad - 1):
        engine.train_batch()
    before = weights(engine)
    with pytest.raises(TrainingError, match=str(BAD)) as error:
        engine.train_batch()
    assert error.value.code == "training-nonfinite"
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    engine.train_batch()  # a caller who catches it can go on
    engine.close()


@world(2)
def test_a_gradient_made_in_backward_alone_names_the_parameter() -> None:
    engine = engine_of(2)
    weight = next(p for n, p in engine.module.named_parameters() if n == "second.weight")
    if engine.mesh.rank == 1:
        weight.register_hook(lambda grad: grad * float("inf"))
    with warnings() as told:
        for x in torch.ones(2, 2, 4):
            engine.backward(engine(x * torch.tensor([[1.0], [2.0]])))
            engine.step()
    if engine.mesh.rank == 0:
        assert len(told) == 1
        assert "began in a backward" in told[0]
        assert "second.weight" in told[0]
    engine.close()


@world(1)
def test_a_search_leaves_buffers_and_random_numbers() -> None:
    engine = engine_of(0, on_nonfinite="skip")
    norm = engine.module.norm
    for _ in range(step_of_the_bad_sample(engine) * 2 - 1):
        engine.backward(engine(torch.randn(2, 4)))
        engine.step()
    held: dict[str, Any] = {}
    assert engine.optimizer is not None
    judge = engine.optimizer.judge
    assert judge is not None

    def watched(first: str | None) -> bool:
        held["before"] = (torch.get_rng_state(), norm.running_mean.clone())
        skip = judge(first)
        held["after"] = (torch.get_rng_state(), norm.running_mean.clone())
        return skip

    engine.optimizer.judge = watched
    engine.backward(engine(torch.randn(2, 4)) * float("nan"))
    assert engine.step().skipped
    for before, after in zip(held["before"], held["after"], strict=True):
        assert torch.equal(before, after)
    engine.close()


@world(1)
def test_step_without_backward_is_an_error() -> None:
    engine = engine_of(1)
    engine.backward(engine(torch.randn(2, 4)))
    engine.step()
    with pytest.raises(PlanError) as error:
        engine.step()
    assert error.value.code == "engine-no-backward"
    engine(torch.randn(2, 4)).backward()  # a loss that the engine never saw counts, too
    engine.step()
    engine.close()


@world(1)
def test_a_loss_that_jumps_stops_the_run() -> None:
    engine = engine_of(0, loss_spike_threshold=20.0, gradient_accumulation_steps=1)
    for _ in range(30):
        engine.backward(engine(torch.randn(2, 4)))
        engine.step()
    engine.backward(engine(torch.randn(2, 4)) * 1e6)
    with pytest.raises(TrainingError, match="standard deviations") as error:
        engine.step()
    assert error.value.code == "training-loss-jump"
    engine.close()
