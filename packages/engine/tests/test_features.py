"""Training features that a section switches on, each in a run: what it changes, and what it must not change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ds_engine
import ds_monitor
from ds_config.errors import ConfigError, PlanError, UnsupportedError
from ds_engine import Engine, SumLoss
from ds_zero.runtime.suspend import KINDS

Make = Callable[[], nn.Module]
Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def start(make_model: Make, config: Settings) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def run(model: nn.Module | None = None, **changes: Any) -> Engine:
        engines.append(ds_engine.initialize(model=model or make_model(), config=config(**changes))[0])
        return engines[-1]

    yield run
    for engine in engines:
        engine.close()


def batches(rows: Any, count: int, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(rows.x[i * size : (i + 1) * size], rows.y[i * size : (i + 1) * size]) for i in range(count)])


def values(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


@pytest.mark.parametrize("scaling", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}])
def test_dividing_before_is_dividing_after(start: Callable[..., Engine], rows: Any, scaling: dict[str, Any]) -> None:
    plain, scaled = start(), start(**scaling)
    for engine in (plain, scaled):
        result = engine.train_batch(batches(rows, 2))
    for name, value in values(plain).items():
        torch.testing.assert_close(values(scaled)[name], value, rtol=1e-6, atol=1e-7)
    assert scaled.last is not None
    assert scaled.last.loss == pytest.approx(plain.last.loss)  # type: ignore[union-attr]
    assert result.norm == pytest.approx(plain.last.norm)  # type: ignore[union-attr]


def test_what_the_loop_ends_is_a_step(start: Callable[..., Engine], rows: Any) -> None:
    """Unmanaged: backward only accumulates, as often as it is called; every step() updates."""
    engine = start(managed_gradient_accumulation=False, train_batch_size=8, gradient_accumulation_steps=2)
    assert not engine.is_gradient_accumulation_boundary()
    for batch in batches(rows, 3):
        engine.backward(engine(*batch))
    result = engine.step()
    assert result.applied
    assert (engine.global_steps, engine.global_samples) == (1, 12)
    first = start(managed_gradient_accumulation=False)
    with torch.no_grad():
        mean = sum(first(*b).item() for b in batches(rows, 3)) / 3
    assert result.loss == pytest.approx(mean)


class Dropping(nn.Module):
    """Notes the keywords that the engine adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.told = nn.Linear(6, 1), list[float]()

    def forward(self, x: Tensor, y: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        if progressive_layer_drop:
            self.told.append(pld_theta)
        return (self.layer(x) - y).square().mean()


def test_layers_to_drop_are_told_in_training_only(start: Callable[..., Engine], rows: Any) -> None:
    model = Dropping()
    engine = start(model, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})
    for _ in range(2):
        engine.train_batch(batches(rows, 2))
    engine.eval_batch(batches(rows, 2))
    later = 0.5 * 2.718281828459045**-0.1 + 0.5
    assert model.told == pytest.approx([1.0, 1.0, later, later])


class Cutting(nn.Module):
    """Notes the length that the engine tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.told = nn.Linear(6, 1), list[int | None]()

    def forward(self, x: Tensor, y: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        self.told.append(curriculum_seqlen)
        return (self.layer(x) - y).square().mean()


def test_the_length_of_the_curriculum_is_told_in_training_only(start: Callable[..., Engine], rows: Any) -> None:
    model = Cutting()
    options = {"total_curriculum_step": 4, "difficulty_step": 8}
    engine = start(
        model,
        curriculum_learning={"enabled": True, "min_difficulty": 8, "max_difficulty": 64, "schedule_config": options},
    )
    for _ in range(5):
        engine.train_batch(batches(rows, 2))
    assert model.told[::2] == model.told[1::2]
    assert model.told[::2] == [16, 32, 48, 64, 64]  # floor(t / 4 * 56 + 8), down to a multiple of 8
    engine.eval_batch(batches(rows, 2))
    assert model.told[-2:] == [None, None]
    assert "curriculum_seqlen" in str(engine.plan)
    with pytest.raises(ConfigError) as error:
        start(curriculum_learning={"enabled": True, "schedule_config": {"difficulty_step": 8}})
    assert error.value.code == "data-schedule"


def test_flops_are_counted_once_and_written(start: Callable[..., Engine], rows: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "flops.txt"
    engine = start(
        flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(out), "recompute_fwd_factor": 1}
    )
    engine.train_batch(batches(rows, 2))
    assert not out.exists()
    engine.train_batch(batches(rows, 2))
    text = out.read_text()
    flops = 2 * 4 * (6 * 8 + 8 * 1)  # two Linear layers, four samples
    assert f"forward             {flops} FLOPs ({flops // 2} MACs)" in text
    # The input needs no gradient, so the first layer has one product in backward, the last one two.
    assert f"backward            {flops + 2 * 4 * 8} FLOPs, counted; computed again {flops} FLOPs" in text
    assert "Linear" in text
    assert engine.last is not None
    assert set(engine.last.timings) == {"forward", "backward", "step"}
    changed = out.stat().st_mtime_ns
    engine.train_batch(batches(rows, 2))
    assert out.stat().st_mtime_ns == changed


def test_a_profile_that_cannot_be_written_is_a_warning(
    start: Callable[..., Engine], rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the end of a training whose step has been applied already on this rank, while others go on."""
    engine = start(flops_profiler={"enabled": True, "profile_step": 1, "output_file": str(tmp_path)})
    with caplog.at_level(logging.WARNING, "ds_engine"):
        engine.train_batch(batches(rows, 2))
    (line,) = [r.getMessage() for r in caplog.records if "was not written" in r.getMessage()]
    assert "Is a directory" in line
    assert "MACs" in line


def test_memory_is_told_after_each_phase(
    start: Callable[..., Engine], rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ds_monitor.MemorySink()
    ds_monitor.attach([sink])
    with caplog.at_level(logging.INFO, "ds_engine"):
        start(memory_breakdown=True, steps_per_print=2).train_batch(batches(rows, 2))
        assert not [r for r in caplog.records if "memory after" in r.getMessage()]
        start(memory_breakdown=True).train_batch(batches(rows, 2))
    ds_monitor.detach([sink])
    (line,) = [r.getMessage() for r in caplog.records if "memory after" in r.getMessage()]
    assert "forward" in line
    assert "peak" in line
    told = {r.name for r in sink.records if r.name.startswith("Train/memory")}
    assert told == {f"Train/memory/{what}_bytes" for what in ("forward", "backward", "step", "allocated", "peak")}


def test_the_state_at_the_start_is_told_where_it_is_asked_for(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ds_engine"):
        start()
        assert caplog.records == []
        engine = start(dump_state=True)
    (line,) = [r.getMessage() for r in caplog.records]
    assert str(engine.plan) in line
    assert '"train_batch_size": 8' in line


def test_collectives_are_counted(start: Callable[..., Engine], rows: Any) -> None:
    engine = start(comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]})
    comms = engine._telemetry.comms
    assert comms is not None
    assert comms.config.prof_ops == ("all_reduce",)
    assert start(comms_logger={"enabled": False})._telemetry.comms is None


@pytest.mark.parametrize("stage", [0, 3])
def test_state_goes_away_and_comes_back(start: Callable[..., Engine], rows: Any, stage: int) -> None:
    settings: dict[str, Any] = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    halves = [[(x.bfloat16(), y.bfloat16()) for x, y in batches(rows, 2)] for _ in range(2)]
    engine, other = start(**settings), start(**settings)
    for one in (engine, other):
        one.train_batch(iter(halves[0]))
    engine.offload_states(include=["optimizer"])
    kept = [unit.full.untyped_storage().nbytes() for unit in engine.sharding.units]
    assert all(kept)
    for call in (lambda: engine.train_batch(iter(halves[1])), lambda: engine.full_state_dict()):
        with pytest.raises(PlanError) as caught:
            call()
        assert caught.value.code == "engine-suspended"
    engine.suspend()
    assert sum(unit.full.untyped_storage().nbytes() for unit in engine.sharding.units) == 0
    engine.resume()
    for one in (engine, other):
        one.train_batch(iter(halves[1]))
    for name, value in values(other).items():
        assert torch.equal(values(engine)[name], value)


def test_only_known_state_can_be_moved(start: Callable[..., Engine]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        start().offload_states(include=["optimiser"])
    assert caught.value.code == "zero-suspend-kind"
    assert KINDS[0] in caught.value.fix


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_whole_model_in_one_file(start: Callable[..., Engine], tmp_path: Path, make_model: Make, name: str) -> None:
    engine = start(bf16={"enabled": True}, zero_optimization={"stage": 3})
    engine.module.get_parameter("first.bias").requires_grad_(False)
    theirs = tmp_path.parent / f"{tmp_path.name}-theirs"
    theirs.write_text("thesis")
    for link in (name, f".{name}.part"):
        (tmp_path / link).symlink_to(theirs)
    assert engine.save_16bit_model(tmp_path, name)
    assert theirs.read_text() == "thesis"
    (tmp_path / f".{name}.part").unlink()
    found = load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
    assert set(found) == set(make_model().state_dict())
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    make_model().load_state_dict(found)
    assert "first.bias" not in engine.full_state_dict(torch.float32, exclude_frozen=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_values_can_be_put_in(start: Callable[..., Engine], make_model: Make) -> None:
    engine, fresh = start(zero_optimization={"stage": 3}), make_model()
    state = {name: torch.ones_like(value) for name, value in fresh.state_dict().items()}
    assert engine.load_full_state_dict(state) == ([], [])
    assert all(bool((value == 1).all()) for value in engine.full_state_dict().values())


def test_tied_parameters_are_written_once(start: Callable[..., Engine], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    engine = start(model)
    state = engine.full_state_dict()
    assert state["0.weight"] is state["1.weight"]
    engine.save_16bit_model(tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["0.weight"]


def test_rates_and_momenta_are_read_and_set(start: Callable[..., Engine]) -> None:
    engine = start()
    assert engine.get_mom() == [(0.9, 0.999)]
    engine.set_lr(0.5)
    engine.set_mom([0.8, 0.9])
    assert (engine.get_lr(), engine.get_mom()) == ([0.5], [(0.8, 0.9)])
    with pytest.raises(Exception, match="2 learning rates for 1 parameter groups"):
        engine.set_lr([0.1, 0.2])
    sgd = start(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}})
    sgd.set_mom(0.7)
    assert sgd.get_mom() == [0.7]


def test_the_batch_may_change_between_steps(start: Callable[..., Engine], rows: Any) -> None:
    engine = start()
    engine.set_train_batch_size(16)
    assert (engine.plan.batch.accumulation, len(engine.plan.program.backwards(0))) == (4, 4)
    engine.set_train_micro_batch_size(8)
    assert engine.plan.batch.train == 32
    with pytest.raises(PlanError) as caught:
        engine.set_train_batch_size(12)
    assert caught.value.code == "batch-arithmetic"
    engine.backward(engine(*next(batches(rows, 1))))
    engine.step()
    with pytest.raises(PlanError) as caught:
        engine.set_train_batch_size(8)
    assert caught.value.code == "engine-call-order"


def test_tokens_are_counted(start: Callable[..., Engine], make_model: Make, rows: Any) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x: Tensor, y: Tensor) -> SumLoss:
            return SumLoss(self.inner(x, y) * 7, 7)

    engine = start(Summed())
    assert engine.train_batch(batches(rows, 2)).tokens == 14
    engine.train_batch(batches(rows, 2))
    assert engine.tokens == 28


def test_dropped_gradients_are_not_stepped(start: Callable[..., Engine], rows: Any) -> None:
    engine = start()
    before = values(engine)
    for batch in batches(rows, 2):
        engine.backward(engine(*batch))
        engine.zero_grad()
        engine.step()
    for name, value in values(engine).items():
        assert torch.equal(value, before[name])
