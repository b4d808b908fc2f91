"""Gradients of several units in one message, for units so small that a message of their own costs more than their bytes.

Each unit's way does what it does alone up to its message, which it gives to a `JointMessage` instead: an arena to be summed, or pieces for the
other ranks. `send` starts one message for all of them; every unit waits for the same one and then has its sums where they would be anyway.
Which units go together is decided before, on all ranks alike (`buckets_of`), so a unit that is late makes its bucket late, nothing else.

Cost besides the message: what is packed is copied once on each side. Arenas are packed whole; of an exchange the short runs only, long
ones leave from where they lie. Elements are summed over the ranks in the order of the collective: over two ranks to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Work
from ds_zero.layout.elements import UnitLayout
from ds_zero.runtime.gradients import Gradients, Pieces
from ds_zero.runtime.unit_groups import GroupSet

__all__ = ["JointMessage", "buckets_of", "reduce_together"]

_PACKED_BYTES = 512 * 1024
"""Pieces below are packed; above a message of their own takes no longer than copying them."""


class JointMessage:
    """One message of several units of one group set, and what every one of them waits for. All ranks make the same calls in the same order.

    `sum` and `exchange` are those of `ds_zero.runtime.gradients.BucketMessage`.
    """

    def __init__(self, group_set: GroupSet) -> None:
        self._seat, self._names = group_set, list[str]()
        self._sums: dict[torch.dtype, list[tuple[Tensor, Tensor, UnitLayout]]] = {}
        self._pieces: list[tuple[Pieces, Pieces]] = []
        self._works: list[Work] = []
        self._then: list[Callable[[], None]] = []
        self._leaving: list[list[Tensor]] = []

    def sum(self, arena: Tensor, out: Tensor, layout: UnitLayout, name: str) -> Work:
        self._names.append(name)
        self._sums.setdefault(arena.dtype, []).append((arena, out, layout))
        return self

    def exchange(self, arriving: Pieces, leaving: Pieces, name: str) -> Work:
        self._names.append(name)
        self._pieces.append((arriving, leaving))
        return self

    def send(self) -> None:
        """Start it."""
        unit = "+".join(self._names)
        for dtype, sums in self._sums.items():
            if sums[0][2].world > 1:
                self._scatter(dtype, sums, unit)
            else:
                self._add(dtype, sums, unit)
        if self._pieces:
            self._exchange(unit)
        self._sums, self._pieces = {}, []

    def _scatter(self, dtype: torch.dtype, sums: Sequence[tuple[Tensor, Tensor, UnitLayout]], unit: str) -> None:
        """Start a reduce-scatter of a bucket in which each rank's chunks of all units are contiguous."""
        pool, ranks, device = self._seat.pool, self._seat.shard_group.size, sums[0][0].device
        whole = pool.take(sum(layout.numel for _, _, layout in sums), dtype, device)
        shard = pool.take(whole.numel() // ranks, dtype, device)
        rows, places, at = whole.view(ranks, -1), list[tuple[Tensor, int]](), 0
        for arena, out, layout in sums:
            for segment, (start, stop) in zip(layout.segments, layout.spans, strict=True):
                rows[:, at : at + segment.chunk].copy_(arena[start:stop].view(ranks, -1))
                places.append((out[segment.at : segment.at + segment.chunk], at))
                at += segment.chunk

        def then() -> None:
            for out, start in places:
                out.copy_(shard[start : start + out.numel()])
            pool.give(whole)
            pool.give(shard)

        self._works.append(
            comm.reduce_scatter_single(shard, whole, group=self._seat.shard_group, async_op=True, unit=unit)
        )
        self._then.append(then)

    def _add(self, dtype: torch.dtype, sums: Sequence[tuple[Tensor, Tensor, UnitLayout]], unit: str) -> None:
        """Start an all-reduce of a bucket of whole units, one after another."""
        pool, device = self._seat.pool, sums[0][0].device
        whole = pool.take(sum(out.numel() for _, out, _ in sums), dtype, device)
        parts = whole.split([out.numel() for _, out, _ in sums])
        for part, (arena, _, _) in zip(parts, sums, strict=True):
            part.copy_(arena[: part.numel()])

        def then() -> None:
            for part, (_, out, _) in zip(parts, sums, strict=True):
                out.copy_(part)
            pool.give(whole)

        self._works.append(comm.all_reduce(whole, group=self._seat.replicate_group, async_op=True, unit=unit))
        self._then.append(then)

    def _exchange(self, unit: str) -> None:
        group = self._seat.shard_group
        arriving, leaving = list[list[Tensor]](), list[list[Tensor]]()
        for rank in range(group.size):
            there = [piece for pieces, _ in self._pieces for piece in pieces[rank]]
            here = [piece for _, pieces in self._pieces for piece in pieces[rank]]
            if rank == group.rank:
                there, here = [], []
            packed = torch.cat(
                [_bytes(piece) for piece in here if _short(piece)] or [torch.empty(0, dtype=torch.uint8, device="cpu")]
            )
            coming = torch.empty(sum(piece.nbytes for piece in there if _short(piece)), dtype=torch.uint8, device="cpu")
            arriving.append([*(p for p in there if not _short(p)), *([coming] if coming.numel() else [])])
            leaving.append([*(p for p in here if not _short(p)), *([packed] if packed.numel() else [])])
            self._then.append(_unpack(coming, [piece for piece in there if _short(piece)]))
        self._leaving = leaving  # until they have left
        self._works.append(comm.all_to_all_pieces(arriving, leaving, group, async_op=True, unit=unit))

    # ---- what each of its units waits for

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when every unit has what it waits for."""
        works, self._works = self._works, []
        for work in works:
            work.wait(timeout)
        then, self._then, self._leaving = self._then, [], []
        with torch.no_grad():
            for each in then:
                each()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""
        return all(work.is_completed() for work in self._works)


def _bytes(piece: Tensor) -> Tensor:
    return piece.view(-1).view(torch.uint8)


def _short(piece: Tensor) -> bool:
    return piece.nbytes < _PACKED_BYTES


def _unpack(coming: Tensor, places: Sequence[Tensor]) -> Callable[[], None]:
    def then() -> None:
        for piece, place in zip(coming.split([place.nbytes for place in places]), places, strict=True):
            _bytes(place).copy_(piece)

    return then if places else lambda: None


def reduce_together(several: Sequence[Gradients]) -> None:
    """Reduce units of one group set that join, as `Gradients.reduce`, in one message.

    Call after collecting, on all ranks the same.
    """
    joint = JointMessage(several[0].groups)
    for gradients in several:
        gradients.way.join(joint)
        gradients.reduce()
    joint.send()


def buckets_of(
    sequence: Sequence[int], members: Sequence[Gradients], numels: Sequence[int], limit: int
) -> list[tuple[int, ...]]:
    """Group neighbours in `sequence`, the reduction order, into buckets of at most `limit` elements. Pure.

    The units of a bucket have the same group set.

    Args:
        members, numels: By number of the unit.
    Returns:
        Buckets of two units or more, in order.
    """
    return [bucket for bucket in _runs(sequence, members, numels, limit) if len(bucket) > 1]


def _runs(
    sequence: Sequence[int], members: Sequence[Gradients], numels: Sequence[int], limit: int
) -> Iterator[tuple[int, ...]]:
    run, total = list[int](), 0
    for number in sequence:
        fits = run and members[run[-1]].groups is members[number].groups and total + numels[number] <= limit
        if run and not (fits and members[number].joins):
            yield tuple(run)
            run, total = [], 0
        if members[number].joins:
            run.append(number)
            total += numels[number]
    yield tuple(run)
