"""Time between two points of a stream: events on the device, the host's clock where there are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["DeviceTimer", "device_timer", "host_timer"]


class DeviceTimer:
    """Measures from `start` to `stop` on the current stream; may be used again and again, also with `with`.

    `start` and `stop` only mark; `elapsed_ms` waits until the end mark was reached.

    Args:
        mark: Marks the present point of the stream and returns the mark.
        between_ms: Milliseconds between two marks; may wait.
    """

    def __init__(self, mark: Callable[[], Any], between_ms: Callable[[Any, Any], float]) -> None:
        self._mark, self._between_ms = mark, between_ms
        self._marks: tuple[Any, ...] = ()

    def start(self) -> None:
        """Mark the beginning, and forget an earlier measurement."""
        self._marks = (self._mark(),)

    def stop(self) -> None:
        """Mark the end; a second stop moves it.

        Raises:
            RuntimeError: the timer was not started.
        """
        if not self._marks:
            raise RuntimeError("this timer was stopped, but not started")
        self._marks = (self._marks[0], self._mark())

    def elapsed_ms(self) -> float:
        """Return the milliseconds between start and stop.

        Raises:
            RuntimeError: the timer was not started and stopped.
        """
        if len(self._marks) != 2:
            raise RuntimeError("this timer was read, but not started and stopped")
        return self._between_ms(*self._marks)

    def __enter__(self) -> DeviceTimer:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def host_timer(synchronize: Callable[[], None]) -> DeviceTimer:
    """Create a timer on the host's clock.

    `synchronize` waits for the device before each reading (free on the CPU).
    """

    def mark() -> float:
        synchronize()
        return time.perf_counter()

    return DeviceTimer(mark, lambda start, stop: (stop - start) * 1e3)


def device_timer(module: Any) -> DeviceTimer:
    """Create a timer on the device's clock, from a pair of the module's timing events.

    Starting and stopping do not block the host.
    """

    def mark() -> Any:
        event = module.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop))

    return DeviceTimer(mark, between_ms)
