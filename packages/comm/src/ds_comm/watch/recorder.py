"""Stamps every operation while somebody watches: it stands between `call` and the ring.

There is one recorder in a process. Before `init_distributed`, and in a world of one, it is the one that does nothing.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ds_comm._torch import second_connection
from ds_comm.groups import OpSequence
from ds_comm.watch.alarms import SideChannel
from ds_comm.watch.call_sites import error_place
from ds_comm.watch.secret import job_secret
from ds_comm.watch.stamp_ring import StampRing
from ds_comm.watch.torch_calls import TorchCalls
from ds_comm.watch.verdict import Finding
from ds_comm.watch.watchdog import DEFAULT_DEADLINE_S, Watchdog, WatchSettings
from ds_config.errors import CommError

__all__ = ["Recorder", "current", "deadline_from", "extend_timeout", "start_recorder", "stop_recorder"]


class Recorder(Protocol):
    """What `call` tells of each operation. `what` is the operation's name, its unit, and the root or peer (-1: none)."""

    def begin(self, order: OpSequence, mark: int, what: tuple[str, str, int], tensor: Tensor | None) -> int:
        """Record the begin of an operation and return its slot."""

    def waiting(self, slot: int) -> None:
        """Mark operation `slot` as blocking the calling thread."""

    def ended(self, slot: int) -> None:
        """Mark operation `slot` as complete."""

    def follow(self, slot: int, key: str, done: Callable[[], bool]) -> None:
        """Mark operation `slot` as complete once `done` returns True; the host does not wait.

        `key` is the group's.
        """

    def explain(self, slot: int) -> Finding | None:
        """Return why operation `slot` failed, as far as other ranks explain the failure."""

    def patience(self, seconds: float, own_waits: bool = True) -> AbstractContextManager[None]:
        """Extend the time that other ranks may wait for this rank to `seconds` while the context is open; see `extend_timeout`."""

    def watching(self) -> bool:
        """Whether somebody reads what is stamped."""

    def close(self, why: str) -> None:
        """Close the recorder for the reason `why`; no operation follows."""


class _Off:
    """Nobody watches."""

    def begin(self, order: OpSequence, mark: int, what: tuple[str, str, int], tensor: Tensor | None) -> int:
        return -1

    def waiting(self, slot: int) -> None: ...

    def ended(self, slot: int) -> None: ...

    def follow(self, slot: int, key: str, done: Callable[[], bool]) -> None: ...

    def explain(self, slot: int) -> Finding | None:
        return None

    def patience(self, seconds: float, own_waits: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def watching(self) -> bool:
        return False

    def close(self, why: str) -> None: ...


class _On:
    def __init__(self, ring: StampRing, watchdog: Watchdog) -> None:
        self._ring, self._watchdog = ring, watchdog
        self.waiting, self.ended, self.follow = ring.waiting, ring.ended, watchdog.follow

    def begin(self, order: OpSequence, mark: int, what: tuple[str, str, int], tensor: Tensor | None) -> int:
        if order.key not in self._watchdog.groups:
            self._watchdog.groups[order.key] = order.ranks
        return self._ring.begin(order.key, order.name, mark, what, tensor)

    def explain(self, slot: int) -> Finding | None:
        stamp = self._ring.stamp(slot)
        return None if stamp is None else self._watchdog.explain(stamp)

    def patience(self, seconds: float, own_waits: bool = True) -> AbstractContextManager[None]:
        return self._watchdog.patience(seconds, own_waits)

    def watching(self) -> bool:
        return self._watchdog.watching

    def close(self, why: str) -> None:
        self._watchdog.stop(why)
        self._ring.close()


_OFF: Recorder = _Off()
_current: list[Recorder] = [_OFF]


def current() -> Recorder:
    """Return the recorder of this process."""
    return _current[0]


def deadline_from(value: str | None) -> float:
    """Parse the seconds of DS_COMM_DEADLINE_S; 60 when unset; 0 turns the watchdog off.

    Raises:
        CommError: it is no number of seconds ("comm-env").
    """
    if not value:
        return DEFAULT_DEADLINE_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise CommError(
            f"DS_COMM_DEADLINE_S is {value[:80]!r}, which is no number of seconds",
            code="comm-env",
            fix="Set it to seconds, as 300; 0 turns the watchdog off.",
        )
    return seconds


def start_recorder(settings: WatchSettings) -> None:
    """Record from now on, and watch. Needs the default process group; does nothing when it runs already."""
    world = dist.group.WORLD
    if world is None or current().watching() or world.size() < 2 or settings.deadline_s <= 0:
        return
    stop_recorder("started anew")  # one may be left of a process group that is gone
    ring = StampRing()
    side = SideChannel(second_connection(world), world.rank(), job_secret())
    watchdog = Watchdog(ring, side, (world.rank(), world.size()), settings, TorchCalls())
    _current[0] = _On(ring, watchdog)
    watchdog.start()
    atexit.register(_at_exit)


def stop_recorder(why: str) -> None:
    """Record no more."""
    recorder, _current[0] = _current[0], _OFF
    atexit.unregister(_at_exit)
    recorder.close(why)


def extend_timeout(seconds: float, *, own_waits: bool = True) -> AbstractContextManager[None]:
    """Let other ranks wait up to `seconds` for this one, whatever the deadline: `with ds_comm.extend_timeout(1800): save()`.

    For a phase that one rank alone goes through while the others wait in a collective.

    Args:
        own_waits: Whether what this rank itself waits for inside may take as long.
    """
    return current().patience(seconds, own_waits)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the exception that ends the interpreter, when one does
    stop_recorder(f"process {os.getpid()} exited" if error is None else _told(error))


def _told(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first} at {error_place(error)}"
