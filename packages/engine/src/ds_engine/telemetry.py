"""What an engine tells about its steps: gauges to the monitor's sinks, one log line now and then, times where asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from torch import nn

import ds_monitor
from ds_accel.memory import MemoryStats
from ds_comm.logger import CommsLogger
from ds_engine.plan import Telling
from ds_engine.profiling import ForwardCounter, Profile, profile_text
from ds_engine.result import StepResult
from ds_monitor import names
from ds_monitor.throughput import ThroughputMeter, Work
from ds_monitor.timers import Timers

__all__ = ["Device", "Telemetry"]

_log = logging.getLogger("ds_engine")
_GIB = 2**30


class Device(Protocol):
    """What is asked of the accelerator."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def memory(self) -> MemoryStats:
        """Bytes in use."""


class Telemetry:
    """Reports steps as the plan says.

    Args:
        telling: What the plan says.
        lead: Whether this is rank 0, the only one that logs.
        device: Waited for where a clock is read that must not run ahead of it.
        comms: Collects what collectives cost; its summary is logged at the end.
    """

    def __init__(self, telling: Telling, lead: bool, device: Device, comms: CommsLogger | None = None) -> None:
        self._telling, self._lead, self._device, self.comms = telling, lead, device, comms
        self._timers = Timers(enabled=telling.phases, synchronize=device.synchronize)
        self._meter = ThroughputMeter() if telling.speed else None
        self._memory: dict[str, MemoryStats] = {}
        self._counter = ForwardCounter() if telling.flops is not None and lead else None
        self._steps = 0
        self._plain = not (telling.phases or telling.memory or telling.flops)

    def phase(self, name: str, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """A span `engine/<name>`; timed, weighed and counted as the plan says. `model` is what runs in a forward."""
        return ds_monitor.span(f"engine/{name}") if self._plain else self._watched(name, model)

    @contextmanager
    def _watched(self, name: str, model: nn.Module | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(ds_monitor.span(f"engine/{name}"))
            if model is not None and self._counts():
                stack.enter_context(self._counter.watch(model))  # type: ignore[union-attr]
            stack.enter_context(self._timers.time(name))
            yield
        if self._telling.memory:
            self._memory[name] = self._device.memory()

    def _counts(self) -> bool:
        flops, counter = self._telling.flops, self._counter
        due = flops is not None and self._steps + 1 == flops.profile_step
        return due and counter is not None and not counter.modules

    def timings(self) -> dict[str, float]:
        """Seconds of each phase since the last call; empty where they are not timed."""
        return {name: timing.total_s for name, timing in self._timers.read().items()}

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
        self._steps = result.step
        every = self._telling.every
        if self._lead and every and result.step % every == 0:
            _log.info("step %d: loss %.4f, lr %s, skipped %d", result.step, result.loss, list(result.lr), skipped)
        if not self._plain:
            self._tell_more(result)
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
        if result.tokens:
            ds_monitor.counter(names.TOKENS, result.tokens)
        for name, seconds in result.timings.items():
            ds_monitor.gauge(f"Train/Samples/elapsed_time_ms_{name}", seconds * 1e3)
        for name, memory in self._memory.items():
            ds_monitor.gauge(f"Train/memory/{name}_bytes", memory.allocated)
        self._speed(result)

    def close(self) -> None:
        """The last words."""
        if self.comms is not None and self._lead and self.comms.has_data():
            self.comms.log_summary()

    def _tell_more(self, result: StepResult) -> None:
        if self._memory and self._lead and result.step % (self._telling.every or 1) == 0:
            used = ", ".join(f"{name} {m.allocated / _GIB:.2f} GiB" for name, m in self._memory.items())
            peak = max(m.peak for m in self._memory.values())
            _log.info("memory after each phase of step %d: %s; peak %.2f GiB", result.step, used, peak / _GIB)
        flops, counter = self._telling.flops, self._counter
        if flops is not None and counter is not None and counter.modules and result.step == flops.profile_step:
            text = profile_text(Profile(counter.modules, result.timings, result.samples), flops)
            if flops.output_file is None:
                _log.info("%s", text)
            else:
                Path(flops.output_file).write_text(text + "\n")

    def _speed(self, result: StepResult) -> None:
        if self._meter is None:
            return
        if self._telling.synchronize:
            self._device.synchronize()
        self._meter.step(Work(result.samples, result.tokens))
        rates = self._meter.rates()
        if rates is not None:
            ds_monitor.gauge("Train/samples_per_s", rates.samples_per_s)
            if rates.tokens_per_s:
                ds_monitor.gauge("Train/tokens_per_s", rates.tokens_per_s)
