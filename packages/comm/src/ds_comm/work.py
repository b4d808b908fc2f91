"""What a collective returns: something to wait for, also where there is nothing to wait for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

from ds_comm.transports import Started

__all__ = ["DONE", "Pending", "Work"]


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


DONE: Work = _Done()


class Pending:
    """An operation on its way, with what remains to do at its end, and the span that ends with it."""

    __slots__ = ("_span", "_started")

    def __init__(self, started: Started, span: AbstractContextManager[None]) -> None:
        self._started: Started | None = started
        self._span = span

    def wait(self, timeout: timedelta | None = None) -> bool:
        started, self._started = self._started, None
        if started is None:
            return True
        for work in started.works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        if started.finish is not None:
            started.finish()
        self._span.__exit__(None, None, None)
        return True

    def is_completed(self) -> bool:
        return self._started is None or all(work.is_completed() for work in self._started.works)
