"""Timers and rates against a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_monitor as m
from ds_monitor import MemorySink
from ds_monitor.stats import trimmed_mean
from ds_monitor.throughput import StepWork, ThroughputMeter, transformer_flops_per_token
from ds_monitor.timers import Timers


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_trimmed_mean_drops_both_tails() -> None:
    assert trimmed_mean([1000.0, *[2.0] * 8, -1000.0]) == 2.0
    assert trimmed_mean([1.0, 3.0], 0.1) == 2.0  # too few to trim
    assert trimmed_mean([1.0, 2.0, 9.0], 0.34) == 2.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 0.49))
def test_trimmed_mean_lies_between_the_extremes_and_ignores_order(values: list[float], fraction: float) -> None:
    mean = trimmed_mean(values, fraction)
    assert min(values) - 1e-6 <= mean <= max(values) + 1e-6
    assert trimmed_mean(values[::-1], fraction) == mean


@pytest.mark.parametrize(("values", "fraction"), [([], 0.1), ([1.0], 0.5), ([1.0], -0.1)])
def test_trimmed_mean_refuses(values: list[float], fraction: float) -> None:
    with pytest.raises(ValueError):
        trimmed_mean(values, fraction)


def test_timers_nest_repeat_and_reset(memory: MemorySink) -> None:
    clock, waits = Clock(), []
    timers = Timers(clock=clock, synchronize=lambda: waits.append(clock.now_s))
    for seconds in (1.0, 3.0):
        with timers.time("step"):
            timers.start("forward")
            clock.now_s += seconds
            timers.stop("forward")
            clock.now_s += 1
    timers.start("running")
    seen = timers.report("T/")
    assert (seen["forward"].count, seen["forward"].total_s, seen["forward"].mean_s) == (2, 4.0, 2.0)
    assert seen["step"].total_s == 6.0
    assert "running" not in seen
    assert [(r.name, r.value) for r in memory.records] == [("T/forward_ms", 2000.0), ("T/step_ms", 3000.0)]
    assert len(waits) == 9
    assert timers.read() == {}


def test_timers_refuse_an_order_that_cannot_be() -> None:
    timers = Timers(clock=Clock())
    with pytest.raises(ValueError, match="'a' is stopped without a start"):
        timers.stop("a")
    timers.start("a")
    with pytest.raises(ValueError, match="started twice"):
        timers.start("a")


def test_a_timed_block_that_raises_is_counted() -> None:
    timers = Timers(clock=Clock())
    with pytest.raises(KeyError), timers.time("a"):
        raise KeyError
    assert timers.read()["a"].count == 1


def test_disabled_timers_read_no_clock_and_wait_for_nothing() -> None:
    def never() -> float:
        raise RuntimeError("called")

    timers = Timers(enabled=False, clock=never, synchronize=never)  # type: ignore[arg-type]
    with timers.time("a"):
        timers.start("b")
    timers.stop("c")
    assert timers.read() == {}


def test_rates_leave_out_warmup_and_pauses() -> None:
    clock = Clock()
    meter = ThroughputMeter(peak_flops_per_s=1000.0, warmup_steps=1, clock=clock)
    clock.now_s += 60
    meter.step(StepWork(samples=4, tokens=40, flops=400))  # warm-up
    assert meter.rates() is None
    for _ in range(4):
        clock.now_s += 2
        meter.step(StepWork(samples=4, tokens=40, flops=400))
    clock.now_s += 500  # an evaluation
    meter.pause()
    clock.now_s += 2
    meter.step(StepWork(samples=4, tokens=40, flops=400))
    rates = meter.rates()
    assert rates is not None
    assert (rates.steps, rates.step_s) == (5, 2.0)
    assert (rates.samples_per_s, rates.tokens_per_s, rates.flops_per_s) == (2.0, 20.0, 200.0)
    assert rates.mfu == pytest.approx(0.2)


def test_rates_speak_of_the_window_only() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=0, window=2, clock=clock)
    for seconds in (50, 1, 1):
        clock.now_s += seconds
        meter.step(StepWork(samples=3))
    rates = meter.rates()
    assert rates is not None
    assert (rates.samples_per_s, rates.mfu) == (3.0, None)


def test_a_peak_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops_per_s is 0"):
        ThroughputMeter(peak_flops_per_s=0)


def test_flops_per_token_of_gpt3() -> None:
    # Brown et al. 2020, table D.1: 3.14e23 FLOPs for 300e9 tokens at 174.6e9 parameters, attention left out.
    per_token = transformer_flops_per_token(174_600_000_000, num_layers=0, hidden=12288, sequence=2048)
    assert per_token * 300e9 == pytest.approx(3.14e23, rel=0.01)
    with_attention = transformer_flops_per_token(174_600_000_000, num_layers=96, hidden=12288, sequence=2048)
    assert with_attention - per_token == 12 * 96 * 12288 * 2048


def test_monitor_keeps_the_step_without_sinks() -> None:
    m.set_step(7)
    assert m.current_step() == 7
