"""What an engine tells about its steps: gauges to the monitor's sinks, one log line now and then, times where asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import ds_monitor
from ds_engine.plan import Telling
from ds_engine.result import StepResult
from ds_monitor import names
from ds_monitor.throughput import ThroughputMeter, Work
from ds_monitor.timers import Timers

__all__ = ["Telemetry"]

_log = logging.getLogger("ds_engine")


class Telemetry:
    """Reports steps as the plan says.

    Args:
        telling: What the plan says.
        lead: Whether this is rank 0, the only one that logs.
        synchronize: Waits for the device; called where a clock is read that must not run ahead of it.
    """

    def __init__(self, telling: Telling, lead: bool, synchronize: Callable[[], None]) -> None:
        self._every = telling.every if lead else None
        self._timers = Timers(enabled=telling.phases, synchronize=synchronize)
        self._meter = ThroughputMeter() if telling.speed else None
        self._wait = synchronize if telling.synchronize else None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A span `engine/<name>`, timed too with `wall_clock_breakdown`."""
        return self._timed(name) if self._timers.enabled else ds_monitor.span(f"engine/{name}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with ds_monitor.span(f"engine/{name}"), self._timers.time(name):
            yield

    def pause(self) -> None:
        """What happened since the last step was no training."""
        if self._meter is not None:
            self._meter.pause()

    def step(self, result: StepResult, samples: int, skipped: int) -> None:
        """Tell of one step.

        Args:
            result: What it did.
            samples: Trained on so far.
            skipped: Steps left out so far.
        """
        if self._every and result.step % self._every == 0:
            _log.info("step %d: loss %.4f, lr %s, skipped %d", result.step, result.loss, list(result.lr), skipped)
        if not ds_monitor.active():
            return
        ds_monitor.set_step(result.step, samples)
        if result.mean is not None:
            ds_monitor.gauge(names.LOSS, result.loss)
        if result.lr:
            ds_monitor.gauge(names.LR, result.lr[0])
        if result.norm is not None:
            ds_monitor.gauge(names.GRAD_NORM, result.norm)
        if result.scale != 1.0:
            ds_monitor.gauge(names.LOSS_SCALE, result.scale)
        for name, timing in self._timers.read().items():
            ds_monitor.gauge(f"Train/Samples/elapsed_time_ms_{name}", timing.total_s * 1e3)
        self._speed(result)

    def _speed(self, result: StepResult) -> None:
        if self._meter is None:
            return
        if self._wait is not None:
            self._wait()
        self._meter.step(Work(result.samples))
        rates = self._meter.rates()
        if rates is not None:
            ds_monitor.gauge("Train/samples_per_s", rates.samples_per_s)
