"""Numbers in shared memory by which the ranks of a host tell each other what they have finished, and wait for it.

    tally = Tally(segment, 0, group, pids)
    number = tally.advance("layers.0")        # what I wrote before is there for whoever sees the number
    tally.wait(number)                        # everyone has come to it, with the same thing

A number is an operation of the recorder like any collective: it has a stamp with what it stands for, a wait for it follows
the group's deadline, and ranks that came to one number with different things are told so instead of reading each other's memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ds_comm.groups import Group
from ds_comm.shm.shm_wait import LIMIT_S, SLICE_S, own_order, wait_until
from ds_comm.watch.recorder import current
from ds_comm.work import failed
from ds_config.errors import CommError
from ds_ops.shm_collectives import HostCounters, SharedSegment

__all__ = ["ShmSequence"]

_KEPT = 64  # numbers whose meaning stays readable; a power of two
_WORD = 2**31


class ShmSequence:
    """One number per rank, from 0 up. Construction is not collective; the memory is, and one collective came before.

    Args:
        segment: Holds the numbers; zero before the first rank came.
        offset: Byte of the first, a multiple of 4096; `nbytes_for(world)` bytes from there belong to them.
        pids: Process id of every rank.
        limit_s: How long a wait may take where no watchdog runs.
    Attributes:
        value: This rank's number.
    Cost: 2 us to advance, 1 us for a wait that need not wait. Not for several threads of a rank at once.
    """

    def __init__(
        self, segment: SharedSegment, offset: int, group: Group, pids: Sequence[int], limit_s: float = LIMIT_S
    ) -> None:
        self._counters = HostCounters(segment, offset, group.rank, pids)
        self._group, self._limit_s = group, limit_s
        self._order = own_order(group, f"tally{offset}")
        self._slots = [-1] * _KEPT
        words = segment.tensor(group.size * _KEPT, torch.int64, offset + HostCounters.nbytes_for(group.size))
        self._meanings = words.view(group.size, _KEPT).numpy()

    @staticmethod
    def nbytes_for(world: int) -> int:
        """Return the bytes that the sequence numbers of `world` ranks take; a multiple of 4096."""
        return HostCounters.nbytes_for(world) + -(-world * _KEPT * 8 // 4096) * 4096

    @property
    def value(self) -> int:
        return self._counters.value

    def advance(self, what: str) -> int:
        """Publish and return this rank's next sequence number, which stands for `what`."""
        number = self.value + 1
        place = number % _KEPT
        if self._order is not None:
            self._slots[place] = current().begin(self._order, number, ("post", what, -1), None)
        self._meanings[self._group.rank, place] = number % _WORD << 32 | zlib.crc32(what.encode())
        return self._counters.advance()

    def reached(self, number: int) -> bool:
        """Whether every rank has come to `number`; then what they wrote before is visible."""
        return self._counters.behind(number) is None

    def wait(self, number: int, what: str = "") -> None:
        """Return when every rank has come to `number`, within the last 64 of this one.

        Raises:
            CommError: a rank ended ("comm-peer-left", "shm-peer-died") or came with something else ("comm-mismatch").
        """
        slot = self._slots[number % _KEPT]
        if not self.reached(number):
            wait_until(
                f"post[{what}] #{number} of group {self._group.name!r}",
                slot,
                lambda: self._counters.wait(number, SLICE_S) is None,
                lambda: self._late(number),
                self._limit_s,
            )
        column = self._meanings[:, number % _KEPT]
        if (column != column[self._group.rank]).any():
            self._compare(number, what, slot)
        if self._order is not None:
            current().ended(slot)

    def _late(self, number: int) -> str:
        rank = self._counters.behind(number)
        return "a rank" if rank is None else f"rank {self._group.ranks[rank]}"

    def _compare(self, number: int, what: str, slot: int) -> None:
        """Raise if another rank means something else; its word may as well be that of a later number."""
        for rank, word in enumerate(self._meanings[:, number % _KEPT].tolist()):
            expected = int(self._meanings[self._group.rank, number % _KEPT])
            if word >> 32 == expected >> 32 and word != expected:
                name = f"post[{what}] #{number} of group {self._group.name!r}"
                error = CommError(
                    f"rank {self._group.global_rank} came to {name} and rank {self._group.ranks[rank]} with something else",
                    code="comm-mismatch",
                    fix="Every rank must make the same calls in the same order: look for a branch that only some ranks take.",
                )
                current().ended(slot)
                raise failed(name, current().explain(slot), error)
