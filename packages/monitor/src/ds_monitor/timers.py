"""Named wall-clock timers: where a step's time goes.

The caller gives `synchronize` (an accelerator's) when the timed work runs on a device; without it only the time to
launch that work is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_monitor.recording import gauge
from ds_monitor.stats import trimmed_mean

__all__ = ["TimerStats", "Timers"]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class TimerStats:
    """What one timer saw since the last reset. Seconds."""

    count: int
    total_s: float
    mean_s: float  # trimmed by a tenth at each end


class Timers:
    """Timers by name; each may run many times, and different names may nest.

    Args:
        enabled: a disabled set takes every call and measures nothing (no clock, no synchronisation).
        synchronize: called before each reading of the clock.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        synchronize: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled, self._synchronize, self._clock = enabled, synchronize, clock
        self._running: dict[str, float] = {}
        self._laps: dict[str, list[float]] = {}

    def start(self, name: str) -> None:
        """Start `name`.

        Raises:
            ValueError: it runs already.
        """
        if not self.enabled:
            return
        if name in self._running:
            raise ValueError(f"timer {name!r} is started twice without a stop")
        self._synchronize()
        self._running[name] = self._clock()

    def stop(self, name: str) -> None:
        """Stop `name` and keep the lap.

        Raises:
            ValueError: it does not run.
        """
        if not self.enabled:
            return
        if name not in self._running:
            raise ValueError(f"timer {name!r} is stopped without a start; running: {sorted(self._running) or 'none'}")
        self._synchronize()
        self._laps.setdefault(name, []).append(self._clock() - self._running.pop(name))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time a `with` block; the lap counts also when the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def read(self, *, reset: bool = True) -> dict[str, TimerStats]:
        """Return the timing of each finished timer, in order of first use.

        `reset` clears the laps; running timers continue.
        """
        timings = {name: TimerStats(len(laps), sum(laps), trimmed_mean(laps)) for name, laps in self._laps.items()}
        if reset:
            self._laps.clear()
        return timings

    def report(self, prefix: str = "Timers/") -> dict[str, TimerStats]:
        """`read()`, and one gauge of the mean in milliseconds per timer: `Timers/forward_ms`."""
        timings = self.read()
        for name, timing in timings.items():
            gauge(f"{prefix}{name}_ms", timing.mean_s * 1e3)
        return timings
