"""What a collective returns: something to wait for, also where there is nothing to wait for."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch

from ds_accel import streams
from ds_comm.transports import Started
from ds_comm.watch.recorder import Recorder
from ds_comm.watch.verdict import Finding
from ds_config.errors import CommError

__all__ = ["DONE", "Chained", "PendingWork", "Work", "failed", "time_device_operations"]


class Work(Protocol):
    """A started operation. Its buffers belong to it until `wait` has returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until this rank's part is done and the result may be read (on accelerators: in the current stream)."""

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""


class _Done:
    """Complete from the start: groups of one, and operations that have been waited for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Chained:
    """An operation with something left to do on this rank at its end."""

    __slots__ = ("_first", "_then", "_waits")

    def __init__(self, first: Work, then: Callable[[], None], waits: bool = False) -> None:
        self._first, self._waits = first, waits
        self._then: Callable[[], None] | None = then

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._first.wait(timeout)
        then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def is_completed(self) -> bool:
        return self._then is None or (not self._waits and self._first.is_completed())


# Where in the backend's sources an error was raised, and its guesses why.
_BACKEND_NOISE = re.compile(r"^\[[^\]]*:\d+\] | This is typically .*")
DONE: Work = _Done()
_FIRST = "Read the output of the rank named above: it ended or diverged first."
_time_device = [False]


def time_device_operations(on: bool) -> None:
    """Whether spans of operations on an accelerator last until the device has done them. Waits for each: costs speed."""
    _time_device[0] = on


class PendingWork:
    """An operation on its way, with what remains to do at its end, and the stamp and span that end with it."""

    __slots__ = ("_host_waits", "_key", "_name", "_recorder", "_slot", "_span", "_started")

    def __init__(
        self,
        started: Started,
        name: object,
        stamp: tuple[Recorder, int, str],
        span: AbstractContextManager[None],
        host_waits: bool,
    ) -> None:
        """`stamp` is the recorder, the slot and the group's key. `host_waits`: whether waiting blocks this thread until the end (CPU), or only the device's stream."""
        self._started: Started | None = started
        self._name, self._span, self._host_waits = name, span, host_waits
        self._recorder, self._slot, self._key = stamp

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation as `Work.wait` does, then finish the operation on this rank.

        Raises:
            CommError: another rank ended ("comm-peer-left") or called a different operation ("comm-mismatch"), or the
            backend
                failed for another reason ("comm-failed").
        """
        started = self._started
        if started is None:
            return True
        try:
            self._wait_for(started, timeout)
            self._started = None
            if started.finish is not None:
                with torch.no_grad():
                    started.finish()
            if _time_device[0] and not self._host_waits:
                torch.accelerator.synchronize()
        except Exception:
            self._started = None
            self._span.__exit__(None, None, None)
            raise
        # Ctrl-C before the end leaves the operation to be waited for again: its buffers are not ours yet.
        self._span.__exit__(None, None, None)
        return True

    def _wait_for(self, started: Started, timeout: timedelta | None) -> None:
        self._recorder.waiting(self._slot)
        try:
            for work in started.works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except RuntimeError as error:
            self._recorder.ended(self._slot)
            failure = failed(self._name, self._recorder.explain(self._slot), error)
            raise failure from (None if isinstance(error, CommError) else error)
        done = None if self._host_waits else _device_end()
        if done is None:
            self._recorder.ended(self._slot)
        else:
            self._recorder.follow(self._slot, self._key, done)

    def is_completed(self) -> bool:
        return self._started is None or all(work.is_completed() for work in self._started.works)


def _device_end() -> Callable[[], bool] | None:
    """Record an event on the current stream and return its query; None while the stream is being captured.

    The query is True once the stream has passed this point, and so every operation that the stream waits for. An event
    is
    used, not the backend's handle: a stored handle would keep the buffers of its operation in memory.
    """
    device = torch.device(_kind(), torch.accelerator.current_device_index())
    return None if streams.is_capturing(device) else streams.record_event(device).query


def _kind() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def failed(name: object, finding: Finding | None, error: RuntimeError) -> CommError:
    """Build the error of an operation that the backend gave up: from the finding, else from the backend's message."""
    if isinstance(error, CommError):  # our own backend knows which rank, the finding also with what
        return error if finding is None else CommError(finding.line, code=finding.code, fix=_FIRST)
    message = _BACKEND_NOISE.sub("", (str(error).splitlines() or [type(error).__name__])[0])
    if finding is not None:
        return CommError(f"{finding.line} ({message})", code=finding.code, fix=_FIRST)
    return CommError(
        f"{name} failed: {message}",
        code="comm-failed",
        fix="See whether all ranks still run and reach each other; the backend's own message is above.",
    )
