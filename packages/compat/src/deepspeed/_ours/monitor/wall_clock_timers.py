"""`deepspeed.utils.timer`: named timers and a throughput meter, on the device's clock where it has one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed._ours.base.forwarding import answers, calls, method, tells
from ds_accel import get_accelerator
from ds_comm import world_group
from ds_monitor.stats import trimmed_mean
from ds_monitor.timers import Timers

_log = logging.getLogger("DeepSpeed")


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Compute the mean without the lowest and highest `trim_percent` (0 to 1) of the values; 0 for no values."""
    if not data:
        return 0.0
    return trimmed_mean(data, min(trim_percent, 0.49))


class _Timer:
    """One named timer of ds-monitor's. Times are milliseconds; starting and stopping waits for the device."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._total = 0.0
        self._records: list[float] = []
        self._timers = Timers(synchronize=get_accelerator().synchronize)

    def start(self) -> None:
        """Begin."""
        self._timers.start(self.name_)
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End, and add to what was; `reset` replaces it, `record` keeps the value for `mean`."""
        self._timers.stop(self.name_)
        passed = 1000 * self._timers.read()[self.name_].total_s
        self._total, self.started_ = (passed if reset else self._total + passed), False
        self._records += [passed] if record else []

    def reset(self) -> None:
        """Forget what was, and a lap that runs."""
        if self.started_:
            self.stop()
        self._total = 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far; a running timer continues."""
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Compute the mean of the recorded times without the extremes."""
        return trimmed_mean(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Named timers: `timers("fwd").start()`."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    get_timers = tells("timers", "Return all timers by name.")

    has_timer = calls("timers.__contains__", "Whether there is one.", "name")

    @staticmethod
    def memory_usage() -> str:
        """Format the device's allocated and peak memory as text."""
        stats = get_accelerator().memory()
        return f"{stats.allocated / 2**30:.2f} GiB allocated, peak {stats.peak / 2**30:.2f} GiB"

    def log(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False, ranks:
        Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Log a line with the named timers in milliseconds, on `ranks` (default: rank 0)."""
        parts = [f"{name}: {self(name).elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        if world_group().rank in (ranks or [0]):
            _log.info("time (ms) | %s%s", " | ".join(parts), f" | {self.memory_usage()}" if memory_breakdown else "")

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of recorded times by name."""
        del reset
        return {name: self(name).mean() / normalizer for name in names if name in self.timers}


class NoopTimer:
    """A `SynchronizedWallClockTimer` that does nothing."""

    class Timer:
        """A timer that does nothing, and measures 0."""

        start = stop = reset = mean = elapsed = answers(0.0, "Return 0: this timer measures nothing.")

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    get_timers = method(lambda self: {}, "Return an empty dict: there are no timers.")
    has_timer = answers(True, "Return True for every name: any timer exists and does nothing.")
    log = answers(None, "Do nothing: there are no times to log.")
    get_mean = method(lambda self, names, **options: {}, "Return an empty dict: no times are recorded.")


class ThroughputTimer:
    """Samples per second of a loop: `start()` and `stop(global_step)` around each microbatch.

    Args:
        config: Its `enabled` switches the timer.
        batch_size: Samples of a step over all ranks.
        start_step: Steps that are not counted.
        steps_per_output: Log every so many steps; None never.
    """

    def __init__(
        self, config: Any, batch_size: int, start_step: int = 2, steps_per_output: int | None = None, monitor_memory:
        bool = False, logging_fn: Callable[[str], Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.batch_size, self.start_step = config, max(1, batch_size), start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or _log.info
        self.initialized = self.started = False
        self.global_step_count = self.micro_step_count = self.epoch_count = 0
        self.total_elapsed_time = self.step_elapsed_time = self.start_time = self.end_time = 0.0

    def update_epoch_count(self) -> None:
        """Count an epoch, whose microbatches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start the clock of a microbatch, which runs from the first counted step on."""
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the clock and count the microbatch; with `global_step` also count a step. Without a `start` it does nothing.

        Waits for the device, unless `synchronized` of the configuration is False.
        """
        if not (self.config.enabled and self.started):
            return
        if getattr(self.config, "synchronized", True):
            get_accelerator().synchronize()
        self.started = False
        self.micro_step_count += 1
        if self.start_time:
            self.end_time = time.perf_counter()
            duration = self.end_time - self.start_time
            self.total_elapsed_time += duration
            self.step_elapsed_time = 0.0 if global_step else self.step_elapsed_time + duration
        self.global_step_count += global_step
        due = self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0
        if global_step and report_speed and due:
            self.logging(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples/s")

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second over the counted steps; minus infinity before the first counted step."""
        counted = self.global_step_count - self.start_step
        return counted * self.batch_size / self.total_elapsed_time if counted > 0 else float("-inf")
