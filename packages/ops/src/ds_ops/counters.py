"""Numbers that only grow, one for each rank of a host, in memory that all of them map."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ds_ops._call as _call
from ds_config.errors import CommError
from ds_ops.segment import SharedSegment

__all__ = ["HostCounters", "outcome_error"]

_SPIN_US, _CROWDED_SPIN_US = 200, 20  # where ranks outnumber cores, one that waits must not keep another from running
_MASK = 2**32 - 1  # native counters wrap
_TIMEOUT = 2
_SIGNALS_MS = 500


class HostCounters:
    """One number per rank of a host that only grows, from 0: how a rank says what it has finished without waiting for it.

    Construction is not collective; the memory is.

    Args:
        segment: Holds the numbers; zero before the first rank came, and kept mapped.
        offset: Byte of the first one, a multiple of 4096; `nbytes_for(world)` bytes from there belong to them.
        rank: This rank's index.
        pids: Process id of every rank: how a rank that died is noticed.
    Attributes:
        value: This rank's number.
    Cost: 0.3 us to advance or to look; a wait spins up to `spin_us`, then sleeps. Not for several threads of a rank at once.
    """

    __slots__ = ("_native", "_spin_us", "_world", "value")

    def __init__(self, segment: SharedSegment, offset: int, rank: int, pids: Sequence[int]) -> None:
        self._native = _call.native().ShmCounters(segment.fd, offset, rank, list(pids))
        self._world, self.value = len(pids), 0
        roomy = len(pids) <= len(os.sched_getaffinity(0))
        self._spin_us = _SPIN_US if roomy else _CROWDED_SPIN_US

    @staticmethod
    def nbytes_for(world: int) -> int:
        """Return the bytes of the counters of `world` ranks, a multiple of 4096."""
        return int(_call.native().shm_counters_bytes(world))

    def advance(self) -> int:
        """Increment this rank's counter and return its value.

        A rank that reads the value also sees all earlier writes of this rank.
        """
        self._native.advance()
        self.value += 1
        return self.value

    def behind(self, value: int) -> int | None:
        """Return the first rank that has not reached `value`; None if all have.

        All ranks' earlier writes are visible after None.
        """
        rank = self._native.behind(value & _MASK)
        return None if rank < 0 else int(rank)

    def wait(self, value: int, timeout_s: float) -> int | None:
        """Return None when every rank has reached `value`, or one that has not after `timeout_s`.

        Raises:
            CommError: a rank that has not reached it ended ("shm-peer-died").
        """
        left_ms = int(timeout_s * 1e3)
        while True:  # in short waits, so that Python can handle signals in between
            code, rank = self._native.wait(value & _MASK, self._spin_us, min(left_ms, _SIGNALS_MS))
            if code == 0:
                return None
            if code != _TIMEOUT:
                raise outcome_error(f"wait for {value}", -1, code, rank)
            left_ms -= _SIGNALS_MS
            if left_ms <= 0:
                return int(rank)


def outcome_error(what: str, rank: int, code: int, peer: int) -> CommError:
    """Build the error of a native wait that ended with `code` while `rank` waited, for `peer` if known."""
    text, name, fix = {
        1: (f"rank {peer} ended while rank {rank} waited for it in {what}", "shm-peer-died", "See that rank's log."),
        2: (
            f"rank {rank} waited too long in {what}" + (f" for rank {peer}" if peer >= 0 else ""),
            "shm-timeout",
            "See where the other ranks are; raise the timeout if they only are slow.",
        ),
        3: (
            f"rank {rank} came to {what} and rank {peer} came with another operation, size, dtype or root",
            "shm-mismatch",
            "Every rank must make the same calls in the same order.",
        ),
        4: (f"{what} on rank {rank}: another rank aborted", "shm-aborted", "See the first error of the other ranks."),
    }[code]
    return CommError(text, code=name, fix=fix)
