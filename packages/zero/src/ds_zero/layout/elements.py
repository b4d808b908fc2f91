"""Where each element of a unit lives: arithmetic over shapes, no torch, no processes.

Words: a *unit* is a set of parameters that travel together; its *full* buffer holds all of them, one after the other.
The full buffer is cut into *segments*; a segment is `world` equal *chunks*, one a rank; a rank's *shard* is its chunk of
every segment, in order. A *slot* is the place of one parameter in the full buffer: always one contiguous range, so a
parameter can be a view. Three ways to lay out the same unit:

    flat    one segment; chunk borders fall anywhere. Least padding, one collective. For elementwise optimizers.
    dim0    one segment a parameter; chunk borders fall between rows (what DTensor's Shard(0) keeps on a rank).
    whole   one segment; no parameter crosses a chunk border. For optimizers that need whole matrices (Muon).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_comm.placement import Interval

__all__ = ["ALIGN", "Kind", "Piece", "Segment", "Slot", "UnitLayout", "plan_layout"]

ALIGN = 16
"""Elements; 64 bytes of fp32. Slots and chunks start at multiples of it, so vector loads are aligned."""

Kind = Literal["flat", "dim0", "whole"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the full buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def interval(self) -> Interval:
        return Interval(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class Segment:
    """`world` equal chunks of the full buffer; rank r's chunk begins at `start + r * chunk`.

    Attributes:
        start: Where the segment begins in the full buffer.
        chunk: Elements a rank.
        at: Where this rank's chunk begins in its shard (the same on every rank).
    """

    start: int
    chunk: int
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank owns of one parameter: `interval` of the flattened parameter, found at `start` of the shard."""

    name: str
    shape: tuple[int, ...]
    interval: Interval
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.interval.numel


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit's full buffer and its shards.

    Attributes:
        slots: In registration order of the parameters.
        world: Number of shards.
        segments: In order of `start`, without gaps.
        kind: Which rule made it.
    """

    slots: tuple[Slot, ...]
    world: int
    segments: tuple[Segment, ...]
    kind: Kind

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return sum(s.chunk for s in self.segments)

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.shard_numel * self.world

    @property
    def gaps(self) -> tuple[Interval, ...]:
        """Ranges of the full buffer that belong to no parameter."""
        found, end = [], 0
        for slot in sorted(self.slots, key=lambda s: s.offset):
            if slot.offset > end:
                found.append(Interval(end, slot.offset))
            end = max(end, slot.offset + slot.numel)
        if end < self.numel:
            found.append(Interval(end, self.numel))
        return tuple(found)

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in order of its shard. Every element of every parameter is in exactly one rank's answer."""
        pieces = []
        for segment in self.segments:
            lo = segment.start + rank * segment.chunk
            mine = Interval(lo, lo + segment.chunk)
            for slot in self.slots:
                both = slot.interval & mine
                if both.numel:
                    inside = both.shifted(-slot.offset)
                    pieces.append(Piece(slot.name, slot.shape, inside, segment.at + both.start - lo))
        return tuple(sorted(pieces, key=lambda p: p.start))


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], world: int, *, kind: Kind = "flat", align: int = ALIGN
) -> UnitLayout:
    """Lay out parameters of `shapes` (registration order) for `world` ranks.

    Slots start at multiples of `align` elements in a full buffer whose chunks are multiples of `align`, whatever the kind.
    Padding: below `align` a parameter plus below `align * world` a segment; `whole` adds the imbalance of its heaviest rank.
    """
    if world < 1 or align < 1:
        raise ValueError(f"a layout needs world >= 1 and align >= 1, got {world} and {align}")
    if kind == "flat":
        return _flat(shapes, world, align)
    if kind == "dim0":
        return _dim0(shapes, world, align)
    if kind == "whole":
        return _whole(shapes, world, align)
    raise ValueError(f"layout kind must be flat, dim0 or whole, got {kind!r}")


def _up(numel: int, align: int) -> int:
    return -(-numel // align) * align


def _flat(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    slots, end = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, tuple(shape), end))
        end += _up(math.prod(shape), align)
    chunk = max(_up(-(-end // world), align), align)
    return UnitLayout(tuple(slots), world, (Segment(0, chunk, 0),), "flat")


def _dim0(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    # A chunk is a whole number of rows and a multiple of align, so rows are added until both hold.
    slots, segments, end, at = [], [], 0, 0
    for name, shape in shapes.items():
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        step = align // math.gcd(align, row) if row else 1
        chunk = max(_up(-(-rows // world), step) * row, align)
        slots.append(Slot(name, tuple(shape), end))
        segments.append(Segment(end, chunk, at))
        end, at = end + chunk * world, at + chunk
    return UnitLayout(tuple(slots), world, tuple(segments) or (Segment(0, align, 0),), "dim0")


def _whole(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    # Longest processing time first (Graham 1969): the heaviest rank is at most 4/3 of the best possible.
    loads, owner = [0] * world, {}
    for name in sorted(shapes, key=lambda n: -math.prod(shapes[n])):
        rank = loads.index(min(loads))
        owner[name] = (rank, loads[rank])
        loads[rank] += _up(math.prod(shapes[name]), align)
    chunk = max(*loads, align) if loads else align
    slots = tuple(Slot(n, tuple(s), owner[n][0] * chunk + owner[n][1]) for n, s in shapes.items())
    return UnitLayout(slots, world, (Segment(0, chunk, 0),), "whole")
