"""What an engine reports about its steps: gauges to the monitor's sinks, and lines on rank 0 where the configuration asks for them.

Lines have the form that DeepSpeed's users know and parse:

    [Rank 0] step=20, skipped=0, lr=[0.001], mom=[(0.9, 0.999)], loss=0.6931
    [Rank 0] epoch=0/micro_step=40/global_step=20, RunningAvgSamplesPerSec=812.4, CurrSamplesPerSec=820.0, ...
    [Rank 0] time (ms) | fwd_microstep: 2.05 | bwd_microstep: 4.11 | bwd_inner_microstep: 3.80 | bwd_allreduce_microstep: 0.31 | step_microstep: 1.07
    [Rank 0] time (ms) | fwd: 4.10 | bwd: 8.23 | bwd_inner: 7.60 | bwd_allreduce: 0.62 | step: 1.07

`bwd_allreduce` is the time inside collectives during backward, `bwd_inner` is backward without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

import ds_monitor
from ds_accel.device_memory import MemoryStats
from ds_comm.logger import CommsLogger
from ds_engine.flops import ForwardCounter
from ds_engine.plan import LoggingPlan
from ds_engine.profiling import Profile, profile_text, write_profile
from ds_engine.result import StepResult
from ds_monitor import log_requested, metric_names
from ds_monitor.throughput import Rates, StepWork, ThroughputMeter
from ds_monitor.timers import Timers

__all__ = ["RunStatus", "Telemetry", "TelemetryDevice"]

_log = logging.getLogger("ds_engine.steps")  # a name of its own, so that a program can send these lines elsewhere
_GIB = 2**30
_MEMORY_EVERY_S = 1.0  # reading it takes 0.1 ms on a CPU, which every step would be 1 % of a step of 10 ms
_SHORT = {
    "forward": "fwd",
    "backward": "bwd",
    "backward_inner": "bwd_inner",
    "backward_allreduce": "bwd_allreduce",
    "step": "step",
}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands after a step.

    Attributes:
        samples: Trained on so far, over all ranks.
        skipped: Steps left out so far.
        micro_steps: Microbatches so far, on this rank.
        epoch: Whole passes over the engine's own data.
        momentum: Of each parameter group.
    """

    samples: int
    skipped: int
    micro_steps: int
    epoch: int
    momentum: list[Any]


class TelemetryDevice(Protocol):
    """What is asked of the accelerator."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def memory(self) -> MemoryStats:
        """Return the device memory in use, in bytes."""


class _Listener:
    """Listens to nothing: while it does, collectives say how long they take, which the breakdown of times needs."""

    def write(self, record: ds_monitor.Measurement) -> None:
        """Pass it over."""

    def end_step(self, step: int) -> None:
        """Do nothing: this sink buffers no records."""

    def close(self) -> None:
        """Do nothing: this sink has no open resource."""


class Telemetry:
    """Reports steps as the plan says.

    Args:
        telling: What the plan says.
        lead: Whether this is rank 0, the only one that logs.
        device: Waited for where a clock is read that must not run ahead of it.
        comms: Collects what collectives cost; its summary is logged at the end.

    Attributes:
        counter: Holds the operations of the profiled step's forward; None where nothing is counted.
        times: Milliseconds of the last step under the names of the lines above, where `wall_clock_breakdown` is on.
    """

    def __init__(
        self, telling: LoggingPlan, lead: bool, device: TelemetryDevice, comms: CommsLogger | None = None
    ) -> None:
        self._telling, self._lead, self._device, self.comms = telling, lead, device, comms
        self._timers = Timers(enabled=telling.phases, synchronize=device.synchronize)
        self._meter = ThroughputMeter() if telling.speed else None
        self._reduced_s, self._calls = 0.0, {"forward": 1, "backward": 1}
        self._listener = _Listener() if telling.breakdown and lead else None
        if self._listener is not None:
            ds_monitor.attach([self._listener])
        self.times: dict[str, float] = {}
        self._memory: dict[str, MemoryStats] = {}
        self._memory_read_s = float("-inf")
        measured = telling.peak_flops_per_s is not None
        self.counter = ForwardCounter() if measured or (telling.flops is not None and lead) else None
        self._counted: nn.Module | None = None  # whose backward is counted next
        self._steps = self._micro_steps = 0
        self._plain = not (telling.phases or telling.memory or self.counter)

    def phase(self, name: str, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Open a span `engine/<name>`, timed, measured and counted as planned. `model` is the module of a forward."""
        return ds_monitor.span(f"engine/{name}") if self._plain else self._watched(name, model)

    @contextmanager
    def _watched(self, name: str, model: nn.Module | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(ds_monitor.span(f"engine/{name}"))
            if (watch := self._counting(name, model)) is not None:
                stack.enter_context(watch)
            stack.enter_context(self._timers.time(name))
            before_s = ds_monitor.span_seconds("comm/")
            yield
            if name == "backward":
                self._reduced_s += ds_monitor.span_seconds("comm/") - before_s
        if self._telling.memory:
            self._memory[name] = self._device.memory()

    def _counting(self, name: str, model: nn.Module | None) -> AbstractContextManager[None] | None:
        """Return the FLOP counter of a phase: of the first forward that is due, and of the backward after it."""
        counter = self.counter
        if counter is None:
            return None
        if model is not None and self._counts():
            self._counted = model
            return counter.watch(model)
        if name == "backward" and self._counted is not None:
            model, self._counted = self._counted, None
            return counter.watch_backward(model)
        return None

    def _counts(self) -> bool:
        counter, flops = self.counter, self._telling.flops
        if counter is None or counter.modules:
            return False
        if flops is not None and self._lead:
            return self._steps + 1 == flops.profile_step
        return ds_monitor.active()

    def timings(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call; empty where phases are not timed."""
        read = self._timers.read()
        self._calls |= {name: timing.count for name, timing in read.items()}
        seconds = {name: timing.total_s for name, timing in read.items()}
        if self._listener is not None and "backward" in seconds:
            reduced_s, self._reduced_s = min(self._reduced_s, seconds["backward"]), 0.0
            seconds |= {"backward_inner": seconds["backward"] - reduced_s, "backward_allreduce": reduced_s}
        return seconds

    def pause(self) -> None:
        """Exclude the time since the last step from the throughput: no training happened."""
        if self._meter is not None:
            self._meter.pause()

    def step(self, result: StepResult, standing: RunStatus) -> None:
        """Tell of one step: what it did, and where the run stands after it."""
        self._steps = result.step
        due = self._lead and bool(self._telling.every) and result.step % (self._telling.every or 1) == 0
        listened = any(sink is not self._listener for sink in ds_monitor.active_sinks())
        rates = self._speed(result, due or listened)
        if due:
            self._tell_step(result, standing, rates)
        if not self._plain:
            self._tell_more(result)
        communicated_s = ds_monitor.span_seconds("comm/")  # of the step that ends here
        if ds_monitor.active():
            ds_monitor.set_step(result.step, standing.samples)
        if listened:
            self._report(result)
            if rates is not None:
                self._report_speed(rates, communicated_s, standing.micro_steps - self._micro_steps)
        self._micro_steps = standing.micro_steps

    def _report(self, result: StepResult) -> None:
        if result.mean is not None:
            ds_monitor.gauge(metric_names.LOSS, result.loss)
        if result.lr:
            ds_monitor.gauge(metric_names.LR, result.lr[0])
        if result.norm is not None:
            ds_monitor.gauge(metric_names.GRAD_NORM, result.norm)
        if result.scale != 1.0:
            ds_monitor.gauge(metric_names.LOSS_SCALE, result.scale)
        if result.tokens:
            ds_monitor.counter(metric_names.TOKENS, result.tokens)
        if result.skipped:
            ds_monitor.counter(metric_names.SKIPPED)
        if result.waited_s:
            ds_monitor.gauge(metric_names.DATA_WAIT, result.waited_s * 1e3)
        for name, seconds in result.timings.items():
            ds_monitor.gauge(f"Train/Samples/elapsed_time_ms_{name}", seconds * 1e3)
        for name, memory in self._memory.items():
            ds_monitor.gauge(f"Train/memory/{name}_bytes", memory.allocated)
        if time.monotonic() - self._memory_read_s >= _MEMORY_EVERY_S:
            self._memory_read_s = time.monotonic()
            memory = self._device.memory()
            ds_monitor.gauge(metric_names.MEMORY, memory.allocated)
            ds_monitor.gauge(metric_names.MEMORY_PEAK, memory.peak)

    def _report_speed(self, rates: Rates, communicated_s: float, microbatches: int) -> None:
        ds_monitor.gauge(metric_names.SAMPLES_RATE, rates.samples_per_s)
        if rates.tokens_per_s:
            ds_monitor.gauge(metric_names.TOKENS_RATE, rates.tokens_per_s)
        ds_monitor.gauge(metric_names.STEP_TIME, rates.last_step_s * 1e3)
        if rates.last_step_s > 0:
            ds_monitor.gauge(metric_names.COMM_SHARE, communicated_s / rates.last_step_s)
        peak, counter = self._telling.peak_flops_per_s, self.counter
        if peak is not None and counter is not None and counter.modules:
            # Backward is two forwards; what is computed again is not counted, as the model does not need it.
            needed = 3 * counter.modules[0].flops * microbatches
            ds_monitor.gauge(metric_names.MFU, needed / rates.step_s / peak)

    def close(self) -> None:
        """Detach the listener and log the summary of collectives."""
        if self._listener is not None:
            ds_monitor.detach([self._listener])
        if self.comms is not None and self._lead and self.comms.has_data():
            self.comms.log_summary()

    def _tell_step(self, result: StepResult, standing: RunStatus, rates: Rates | None) -> None:
        loss = "" if result.mean is None else f", loss={result.loss:.6g}"
        text = f"step={result.step}, skipped={standing.skipped}, lr={list(result.lr)}, mom={standing.momentum}{loss}"
        log_requested(_log, f"[Rank 0] {text}")
        if rates is not None:
            memory = self._device.memory()
            where = f"epoch={standing.epoch}/micro_step={standing.micro_steps}/global_step={result.step}"
            speed = (
                f"RunningAvgSamplesPerSec={rates.samples_per_s:.6g}, CurrSamplesPerSec={rates.last_samples_per_s:.6g}"
            )
            used = f"MemAllocated={memory.allocated / _GIB:.2f}GB, MaxMemAllocated={memory.peak / _GIB:.2f}GB"
            log_requested(_log, f"[Rank 0] {where}, {speed}, {used}")

    def _tell_more(self, result: StepResult) -> None:
        flops, counter = self._telling.flops, self.counter
        lines = [self._times(result, ending) for ending in ("_microstep", "") if self._telling.breakdown]
        self.times = {name: ms for line in lines for name, ms in line.items()}
        if self._lead and result.step % (self._telling.every or 1) == 0:
            for line in filter(None, lines):
                columns = " | ".join(f"{name}: {ms:.2f}" for name, ms in line.items())
                log_requested(_log, f"[Rank 0] time (ms) | {columns}")
            if self._memory:
                used = ", ".join(f"{name} {m.allocated / _GIB:.2f} GiB" for name, m in self._memory.items())
                peak = max(m.peak for m in self._memory.values())
                text = f"memory after each phase of step {result.step}: {used}; peak {peak / _GIB:.2f} GiB"
                log_requested(_log, f"[Rank 0] {text}")
        if flops is not None and counter is not None and counter.modules and result.step == flops.profile_step:
            backward = counter.backward if counter.has_backward else None
            profile = Profile(counter.modules, result.timings, result.samples, backward, counter.again)
            text = profile_text(profile, flops)
            if flops.output_file is None:
                log_requested(_log, f"[Rank 0] {text}")
            else:
                write_profile(text, flops.output_file)

    def _times(self, result: StepResult, ending: str) -> dict[str, float]:
        """Return the milliseconds of each phase: of a microbatch with the ending `_microstep`, of the step without."""
        columns = {}
        for name, short in _SHORT.items():
            if name in result.timings:
                parts = self._calls.get(name.partition("_")[0], 1) if ending else 1
                columns[f"{short}{ending}"] = result.timings[name] / parts * 1e3
        return columns

    def _speed(self, result: StepResult, read: bool) -> Rates | None:
        """Note the step; its speed if it is to be read and is known yet."""
        if self._meter is None:
            return None
        if read and self._telling.synchronize:
            self._device.synchronize()
        self._meter.step(StepWork(result.samples, result.tokens))
        return self._meter.rates() if read else None
