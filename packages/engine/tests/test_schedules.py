"""The five schedules equal their formulas, know nothing of processes, and resume anywhere."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import ds_engine
import ds_ops
from ds_config.errors import ConfigError
from ds_engine.lr_schedules import (
    SCHEDULES,
    LRRangeTest,
    LRScheduler,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

steps = st.integers(-1, 5000)
rates = st.floats(1e-8, 1.0)
sizes = st.integers(1, 600)


@given(steps, rates, sizes, st.floats(0, 10))
def test_range_test(t: int, low: float, size: int, rate: float) -> None:
    plain = LRRangeTest(lr_range_test_min_lr=low, lr_range_test_step_size=size, lr_range_test_step_rate=rate)
    assert plain.lr(t, 1.0) == low * (1 + rate * ((t + 1) / size))
    stairs = plain.model_copy(update={"lr_range_test_staircase": True})
    assert stairs.lr(t, 1.0) == low * (1 + rate * math.floor(Fraction(t + 1, size)))


@given(steps, rates, rates, sizes, st.sampled_from(["log", "linear"]))
def test_warmup(t: int, low: float, high: float, n: int, shape: Any) -> None:
    schedule = WarmupLR(warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=n, warmup_type=shape)
    n = max(n, 2)
    if t < 0:
        share = 0.0
    elif t < n:
        share = math.log(t + 1) / math.log(n) if shape == "log" else t / n
    else:
        share = 1.0
    assert schedule.lr(t, 123.0) == low + (high - low) * share
    own = schedule.model_copy(update={"warmup_max_lr": None})
    assert own.lr(t, high) == schedule.lr(t, 123.0)


@given(steps, rates, rates, sizes, st.integers(1, 4000))
def test_decay(t: int, low: float, high: float, n: int, total: int) -> None:
    schedule = WarmupDecayLR(warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=n, total_num_steps=total)
    n = max(n, 2)
    if t < n:
        assert schedule.lr(t, 9.0) == WarmupLR(warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=n).lr(t, 9.0)
    else:
        assert schedule.lr(t, 9.0) == low + (high - low) * max(0.0, (total - t) / max(1, total - n))
    if t >= max(total, n):
        assert schedule.lr(t, 9.0) == low


@given(steps, rates, sizes, st.integers(1, 4000), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["log", "linear"]))
def test_cosine(t: int, base: float, n: int, total: int, r0: float, m: float, shape: Any) -> None:
    schedule = WarmupCosineLR(
        total_num_steps=total, warmup_num_steps=n, warmup_min_ratio=r0, cos_min_ratio=m, warmup_type=shape
    )
    n = max(n, 2)
    if t < 0:
        ratio = 0.0
    elif t < n:
        ratio = r0 + (1 - r0) * (math.log(t + 1) / math.log(n) if shape == "log" else t / n)
    else:
        ratio = m + (1 - m) * (1 + math.cos(math.pi * min(1, (t - n + 1) / max(1, total - n)))) / 2
    assert schedule.lr(t, base) == base * ratio


@given(steps, sizes, sizes, st.integers(0, 9), st.integers(0, 9), st.integers(0, 50))
def test_one_cycle(t: int, first: int, second: int, up: int, down: int, decay: int) -> None:
    schedule = OneCycle(
        cycle_min_lr=0.1,
        cycle_max_lr=0.7,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=up,
        cycle_second_stair_count=down,
        decay_step_size=decay,
        decay_lr_rate=0.5,
        decay_mom_rate=0.25,
    )
    total = first + second
    if t < total:
        at = (t + 1) % total
        offset, half, stairs = (at, first, up) if at <= first else (total - at, second, down)
        share = float(
            Fraction(math.floor(Fraction(stairs * offset, half)), stairs) if stairs else Fraction(offset, half)
        )
        assert schedule.lr(t, 1.0) == 0.1 + (0.7 - 0.1) * share
        assert schedule.momentum(t) == (0.9 - (0.9 - 0.8) * share, 0.99)
    else:
        k = (t - total + 1) / decay if decay else 0.0
        assert schedule.lr(t, 1.0) == 0.1 / (1 + 0.5 * k)
        assert schedule.momentum(t) == (0.9 * (1 + 0.25 * k), 0.99)


def test_one_cycle_defaults_to_equal_halves() -> None:
    negative = OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=4, cycle_first_stair_count=-1)
    assert [negative.lr(t, 0) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]
    schedule = OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert [schedule.lr(t, 1.0) for t in range(-1, 8)] == [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0]
    assert schedule.model_copy(update={"cycle_momentum": False}).momentum(3) is None


ALL: list[Schedule] = [
    LRRangeTest(lr_range_test_min_lr=(0.1, 0.2)),
    OneCycle(cycle_min_lr=0.1, cycle_max_lr=0.3, cycle_first_step_size=5),
    WarmupLR(warmup_num_steps=6),
    WarmupDecayLR(warmup_num_steps=6, total_num_steps=20),
    WarmupCosineLR(warmup_num_steps=6, total_num_steps=20),
]


def groups() -> list[dict[str, Any]]:
    return [{"lr": 1e-3, "betas": (0.9, 0.999)}, {"lr": 5e-4}]


def holding(groups: list[dict[str, Any]]) -> SimpleNamespace:
    return SimpleNamespace(param_groups=groups)


def test_groups_that_an_optimizer_loads_are_followed() -> None:
    """torch's `load_state_dict` makes a new list of new groups; the rates went into the old ones."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = LRScheduler(WarmupLR(warmup_max_lr=0.4, warmup_num_steps=4, warmup_type="linear"), optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(4):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_lr()[0] == pytest.approx(0.3)


@pytest.mark.parametrize("schedule", ALL, ids=lambda s: type(s).__name__)
def test_resume_anywhere_gives_the_same_values(schedule: Schedule) -> None:
    straight = groups()
    scheduler = LRScheduler(schedule, holding(straight))
    seen = []
    for _ in range(30):
        seen.append([dict(group) for group in straight])
        scheduler.step()
    for at in (0, 1, 7, 29):
        resumed = groups()
        again = LRScheduler(schedule, holding(resumed))
        again.load_state_dict({"last_batch_iteration": at - 1})
        assert [dict(group) for group in resumed] == seen[at]
        assert again.state_dict() == {"last_batch_iteration": at - 1}
        assert again.get_lr() == again.get_last_lr() == [group["lr"] for group in resumed]


def test_base_lr_survives_a_resume_of_the_groups() -> None:
    trained = groups()
    scheduler = LRScheduler(WarmupCosineLR(total_num_steps=10, warmup_num_steps=2), holding(trained))
    for _ in range(5):
        scheduler.step()
    again = LRScheduler(scheduler.schedule, holding([dict(group) for group in trained]))  # lr is already decayed here
    again.load_state_dict(scheduler.state_dict())
    assert again.get_lr() == scheduler.get_lr()


def test_the_first_two_updates_run_at_the_minimum() -> None:
    scheduler = LRScheduler(WarmupLR(warmup_min_lr=0.25, warmup_max_lr=1.0, warmup_num_steps=4), holding(groups()))
    first = scheduler.get_lr()
    scheduler.step()
    assert first == scheduler.get_lr() == [0.25, 0.25]


def test_momentum_goes_only_where_there_are_betas() -> None:
    both = groups()
    LRScheduler(ALL[1], holding(both))
    assert both[0]["betas"] == (0.8, 0.99)
    assert "betas" not in both[1]


def test_a_tensor_lr_keeps_its_identity() -> None:
    torch = pytest.importorskip("torch")
    held = torch.tensor(0.5)
    scheduler = LRScheduler(WarmupLR(warmup_max_lr=1.0, warmup_num_steps=2), holding([{"lr": held}]))
    for _ in range(4):
        scheduler.step()
    assert held.item() == 1.0


def test_per_group_values_must_fit_the_groups() -> None:
    with pytest.raises(ConfigError) as caught:
        LRScheduler(LRRangeTest(lr_range_test_min_lr=(0.1, 0.2, 0.3)), holding(groups()))
    assert caught.value.code == "schedule-groups"
    assert "3 values" in caught.value.message
    assert "2 parameter groups" in caught.value.message


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (OneCycle, {"cycle_min_lr": 0.1}),
        (WarmupDecayLR, {}),
        (WarmupLR, {"warmup_num_steps": -1}),
        (WarmupLR, {"warmup_type": "cubic"}),
        (WarmupLR, {"warmup_num_step": 5}),
        (LRRangeTest, {"lr_range_test_step_size": -1}),
    ],
)
def test_bad_parameters_are_refused(cls: type[Schedule], params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**params)


def test_the_table_is_complete() -> None:
    assert set(SCHEDULES) == {type(schedule).__name__ for schedule in ALL}


def test_one_cycle_of_each_group():
    groups = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.9, 0.99)}]
    params = {"cycle_min_lr": (0.001, 0.002), "cycle_max_lr": (0.01, 0.02), "cycle_min_mom": (0.8, 0.85)}
    scheduler = LRScheduler(OneCycle(**params, cycle_max_mom=0.95, cycle_first_step_size=5), holding(groups))
    assert [group["betas"] for group in groups] == [(0.8, 0.99), (0.85, 0.99)]  # the first update
    assert scheduler.get_mom() == [
        (0.95, 0.99),
        (0.95, 0.99),
    ]  # where the cycle begins, as upstream's scheduler says it
    scheduler.step(4)
    assert scheduler.get_lr() == pytest.approx([0.01, 0.02])
    assert [beta for beta, _ in scheduler.get_mom()] == pytest.approx([0.8, 0.85])
    scheduler.step(9)
    assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.002])
    assert [group["betas"][0] for group in groups] == pytest.approx([0.95, 0.95])
    assert (
        OneCycle(cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=4, cycle_second_step_size=0).lr(2, 0) > 0.7
    )
    assert LRScheduler(WarmupLR(), holding([{"lr": 0.1}])).get_mom() is None


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_without_steps_needs_no_optimizer(kind: str) -> None:
    """transformers fills "auto" so where it only evaluates."""
    section = {"scheduler": {"type": kind, "params": {"total_num_steps": 0, "warmup_num_steps": 0}}}
    asked = {"train_batch_size": 2, "zero_optimization": {"stage": 3}} | section
    model = torch.nn.Linear(3, 1)
    engine, optimizer, _, scheduler = ds_engine.initialize(model=model, config=asked)
    assert optimizer is None
    assert scheduler is None
    assert engine.eval()(torch.ones(2, 3)).shape == (2, 1)
    engine.zero_grad()
    engine.close()
    own = {"optimizer": {"type": "AdamW", "params": {}}}
    for config, chosen in ((asked | own, None), (asked, torch.optim.SGD(model.parameters(), lr=0.1))):
        with pytest.raises(ConfigError, match="total_num_steps is 0") as caught:
            ds_engine.initialize(model=model, optimizer=chosen, config=config)
        assert caught.value.code == "schedule-params"


def test_betas_of_an_optimizer_without_them_are_not_scheduled(caplog: pytest.LogCaptureFixture) -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.1, "momentum": 0.5}]
    muon = ds_ops.optim.Muon(torch.nn.Linear(2, 2).parameters())  # has betas, of the AdamW inside
    for some in (groups, muon.param_groups):
        caplog.clear()
        scheduler = LRScheduler(OneCycle(cycle_min_lr=0.1, cycle_max_lr=0.3), holding(some))
        scheduler.step()
        assert scheduler.get_mom() is None
        assert "cycle_momentum" in caplog.text
    assert groups[0]["momentum"] == 0.5
    assert muon.param_groups[0]["betas"] == (0.9, 0.95)
