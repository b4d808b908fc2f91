"""Where each element of a unit lives, and which ranges of it are summed together: arithmetic over shapes, no torch, no processes.

Words: a *unit* is a set of parameters that travel together; its *full* buffer holds all of them, one after the other.
The full buffer is cut into *segments*; a segment is `world` equal *chunks*, one a rank; a rank's *shard* is its chunk of
every segment, in order. A *slot* is the place of one parameter in the full buffer: always one contiguous range, so a
parameter can be a view. Three ways to lay out the same unit:

    flat    one segment; chunk borders fall anywhere. Least padding, one collective. For elementwise optimizers.
    dim0    one segment a parameter; chunk borders fall between rows (what DTensor's Shard(0) keeps on a rank).
    whole   one segment; no parameter crosses a chunk border. For optimizers that need whole matrices (Muon).

A *run* is a range of a shard that is summed by one call. Long runs are *kept*: they lie in one parameter, and are summed out of the
tensors that autograd made. Ranges too short to be worth a call of their own are copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ds_comm.placement import Interval

__all__ = [
    "ALIGN",
    "Kind",
    "P2PBucket",
    "ParamPiece",
    "ParamSlot",
    "PublishedRange",
    "ReducePlan",
    "ReduceRange",
    "ShardChunk",
    "UnitLayout",
    "gaps_between",
    "pack",
    "plan_copies",
    "plan_layout",
    "plan_sums",
]

ALIGN = 16
"""Elements; 64 bytes of fp32. Slots and chunks start at multiples of it, so vector loads are aligned."""

Kind = Literal["flat", "dim0", "whole"]


@dataclass(frozen=True, slots=True)
class ParamSlot:
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
class ShardChunk:
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
class ParamPiece:
    """What a rank owns of one parameter: `interval` of the flattened parameter, found at `start` of the shard."""

    name: str
    shape: tuple[int, ...]
    interval: Interval
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.interval.numel


@dataclass(frozen=True)
class UnitLayout:
    """A unit's full buffer and its shards.

    Attributes:
        slots: In registration order of the parameters.
        world: Number of shards.
        segments: In order of `start`, without gaps.
        kind: Which rule made it.
    """

    slots: tuple[ParamSlot, ...]
    world: int
    segments: tuple[ShardChunk, ...]
    kind: Kind

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return sum(s.chunk for s in self.segments)

    @cached_property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.shard_numel * self.world

    @cached_property
    def gaps(self) -> tuple[Interval, ...]:
        """Ranges of the full buffer that belong to no parameter."""
        return gaps_between([(slot.offset, slot.offset + slot.numel) for slot in self.slots], self.numel)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each segment in the full buffer."""
        return tuple((s.start, s.start + s.chunk * self.world) for s in self.segments)

    def owned(self, rank: int) -> tuple[ParamPiece, ...]:
        """Return the pieces that `rank` holds, in order of its shard.

        Every element of every parameter is in exactly one rank's pieces.
        """
        pieces = []
        for segment in self.segments:
            lo = segment.start + rank * segment.chunk
            chunk = Interval(lo, lo + segment.chunk)
            for slot in self.slots:
                both = slot.interval & chunk
                if both.numel:
                    inside = both.shifted(-slot.offset)
                    pieces.append(ParamPiece(slot.name, slot.shape, inside, segment.at + both.start - lo))
        return tuple(sorted(pieces, key=lambda p: p.start))


def gaps_between(ranges: Iterable[tuple[int, int]], numel: int) -> tuple[Interval, ...]:
    """Return the intervals of [0, numel) outside the ranges (start, stop), which do not overlap."""
    edges = sorted(ranges)
    pairs = zip([0, *(stop for _, stop in edges)], [*(start for start, _ in edges), numel], strict=True)
    return tuple(Interval(end, start) for end, start in pairs if start > end)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], world: int, *, kind: Kind = "flat", align: int = ALIGN
) -> UnitLayout:
    """Lay out parameters of `shapes` (registration order) for `world` ranks.

    Slots start at multiples of `align` elements in a full buffer whose chunks are multiples of `align`, whatever the kind.
    Padding: below `align` a parameter plus below `align * world` a segment; `whole` adds the imbalance of its heaviest rank.
    """
    if world < 1 or align < 1:
        raise ValueError(f"a layout needs world >= 1 and align >= 1, got {world} and {align}")
    rules = {"flat": _flat, "dim0": _dim0, "whole": _whole}
    if kind not in rules:
        raise ValueError(f"layout kind must be flat, dim0 or whole, got {kind!r}")
    return rules[kind](shapes, world, align)


def _up(numel: int, align: int) -> int:
    return -(-numel // align) * align


def _flat(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    slots, end = [], 0
    for name, shape in shapes.items():
        slots.append(ParamSlot(name, tuple(shape), end))
        end += _up(math.prod(shape), align)
    chunk = max(_up(-(-end // world), align), align)
    return UnitLayout(tuple(slots), world, (ShardChunk(0, chunk, 0),), "flat")


def _dim0(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    # A chunk is a whole number of rows and a multiple of align, so rows are added until both hold.
    slots, segments, end, at = [], [], 0, 0
    for name, shape in shapes.items():
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        step = align // math.gcd(align, row) if row else 1
        chunk = max(_up(-(-rows // world), step) * row, align)
        slots.append(ParamSlot(name, tuple(shape), end))
        segments.append(ShardChunk(end, chunk, at))
        end, at = end + chunk * world, at + chunk
    return UnitLayout(tuple(slots), world, tuple(segments) or (ShardChunk(0, align, 0),), "dim0")


def _whole(shapes: Mapping[str, tuple[int, ...]], world: int, align: int) -> UnitLayout:
    # Longest processing time first (Graham 1969): the heaviest rank is at most 4/3 of the best possible.
    loads, owner = [0] * world, {}
    for name in sorted(shapes, key=lambda n: -math.prod(shapes[n])):
        rank = loads.index(min(loads))
        owner[name] = (rank, loads[rank])
        loads[rank] += _up(math.prod(shapes[name]), align)
    chunk = max(*loads, align) if loads else align
    slots = tuple(ParamSlot(n, tuple(s), owner[n][0] * chunk + owner[n][1]) for n, s in shapes.items())
    return UnitLayout(slots, world, (ShardChunk(0, chunk, 0),), "whole")


# ---- which ranges are summed together


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """Elements [start, stop) of flattened parameter number `member` go to `at` of the full buffer."""

    member: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class ReduceRange:
    """Elements [start, stop) of the shard are the sum over ranks of what begins at `at` of their full buffers.

    Attributes:
        member: The parameter whose gradient stands for this rank's buffer, from its element `first`; None: the buffer.
    """

    start: int
    stop: int
    at: int
    member: int | None = None
    first: int = 0

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Of one rank. `published` names the kept parameters only; all others are published whole. Runs cover the shard, at least one."""

    published: tuple[PublishedRange, ...]
    runs: tuple[ReduceRange, ...]

    @property
    def members(self) -> frozenset[int]:
        """Numbers of the parameters of which a part is kept."""
        return frozenset(run.member for run in self.runs if run.member is not None)


def plan_sums(layout: UnitLayout, rank: int, least: int) -> ReducePlan:
    """Plan which ranges rank `rank` publishes and sums of a unit, in runs of at least `least` elements.

    Cost: O(parameters x segments).
    """
    member_of = {slot.name: member for member, slot in enumerate(layout.slots)}
    published: list[PublishedRange] = []
    runs: list[ReduceRange] = []
    ends: dict[int, list[int]] = {}
    pieces = [piece for piece in layout.owned(rank) if piece.interval.numel >= least]
    for segment in layout.segments:
        done, last = segment.at, segment.at + segment.chunk
        to_full = segment.start + rank * segment.chunk - segment.at
        for piece in (p for p in pieces if segment.at <= p.start < last):
            member = member_of[piece.name]
            if piece.start > done:
                runs.append(ReduceRange(done, piece.start, done + to_full))
            done = piece.stop
            runs.append(ReduceRange(piece.start, done, piece.start + to_full, member, piece.interval.start))
            ends.setdefault(member, []).extend((piece.interval.start, piece.interval.stop))
        if done < last:
            runs.append(ReduceRange(done, last, done + to_full))
    for member, inside in ends.items():
        slot = layout.slots[member]
        for start, stop in list(pairwise((0, *sorted(inside), slot.numel)))[::2]:
            if stop > start:
                published.append(PublishedRange(member, start, stop, slot.offset + start))
    return ReducePlan(tuple(published), tuple(runs) or (ReduceRange(0, 0, 0),))


@dataclass(frozen=True)
class P2PBucket:
    """What one rank gets from each other rank, in a buffer as long as its shard: large runs first, each in a message of its own, then
    all others in one.

    Attributes:
        plan: Its runs.
        places: Of each run, where it begins in that buffer.
        large: Numbers of the runs with a message of their own, in order.
        small: Numbers of the others.
        packed: Place of the first of those; they end with the buffer.
    """

    plan: ReducePlan
    places: tuple[int, ...]
    large: tuple[int, ...]
    small: tuple[int, ...]
    packed: int

    @cached_property
    def messages(self) -> list[tuple[int, int]]:
        """(start, stop) of each in the buffer."""
        bounds = [(self.places[i], self.places[i] + self.plan.runs[i].numel) for i in self.large]
        return bounds + ([(self.packed, self.plan.runs[-1].stop)] if self.small else [])


def pack(layout: UnitLayout, rank: int, least: int) -> P2PBucket:
    """Plan the bucket that rank `rank` receives of a unit; runs of `least` elements are separate messages.

    Cost: O(parameters x segments).
    """
    plan = plan_sums(layout, rank, least)
    large = tuple(i for i, run in enumerate(plan.runs) if run.member is not None)
    small = tuple(i for i, run in enumerate(plan.runs) if run.member is None)
    places, end = {}, 0
    for i in (*large, *small):
        places[i], end = end, end + plan.runs[i].numel
    ordered = tuple(places[i] for i in range(len(plan.runs)))
    return P2PBucket(plan, ordered, large, small, sum(plan.runs[i].numel for i in large))


def plan_copies(
    layout: UnitLayout, parcels: Sequence[P2PBucket], begins: Sequence[int]
) -> tuple[tuple[int, int, int, int], ...]:
    """Plan the copies of all short runs into a buffer where each rank's runs begin at `begins`.

    Returns:
        (parameter, its first element, elements, destination) per copy, by destination.
    """
    copies = []
    for parcel, begin in zip(parcels, begins, strict=True):
        for i in parcel.small:
            run = parcel.plan.runs[i]
            for member, slot in enumerate(layout.slots):
                both = Interval(run.at, run.at + run.numel) & slot.interval
                if both.numel:
                    at = begin + parcel.places[i] - parcel.packed + both.start - run.at
                    copies.append((member, both.start - slot.offset, both.numel, at))
    return tuple(sorted(copies, key=lambda copy: copy[3]))
