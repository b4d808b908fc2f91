"""How one dim of a weight is cut over tensor-parallel ranks. Pure arithmetic.

Words: a dim is one or several *parts* behind each other (a fused QKV has three, of unequal sizes). A part is made of equal
*units* that no rank may get a fraction of: a query head, a key-value head, a grain. A *cut* says which stretch of every part
each rank holds. Ranks with equal stretches of a part are its *sharers*: key-value heads fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ds_config.errors import PlanError
from ds_parallel.heads import HeadCounts, Stretch, spread

__all__ = ["DimShards", "HeadUnit", "ShardPart", "cut_dim"]


class HeadUnit(Enum):
    """What a part is made of."""

    QUERY = "query heads"
    KEY_VALUE = "key-value heads"
    GROUP = "groups of a key-value head and its query heads"
    GRAIN = "even"


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One part of a dim.

    Attributes:
        unit: What no rank gets a fraction of.
        size: In elements; None: what the others leave, in proportion to the heads of those that say nothing either.
    """

    unit: HeadUnit = HeadUnit.GRAIN
    size: int | None = None


@dataclass(frozen=True, slots=True)
class DimShards:
    """A dim, cut.

    Attributes:
        dim: Which.
        size: Of the uncut dim.
        parts: For every part, the stretch of each rank.
    """

    dim: int
    size: int
    parts: tuple[tuple[Stretch, ...], ...]

    def stretches(self, rank: int) -> tuple[Stretch, ...]:
        """Return the range of every part that `rank` has, in the order of the parts."""
        return tuple(part[rank] for part in self.parts)

    def width(self, rank: int) -> int:
        """Return the number of elements of the dim that `rank` has."""
        return sum(stop - start for start, stop in self.stretches(rank))

    def sharers(self, part: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same range of `part` as `rank`, including `rank`."""
        stretch_of_rank = self.parts[part][rank]
        return tuple(other for other, stretch in enumerate(self.parts[part]) if stretch == stretch_of_rank)

    @property
    def shared(self) -> bool:
        """Whether some stretch is held by several ranks."""
        return any(len(set(part)) < len(part) for part in self.parts)


def cut_dim(
    size: int, dim: int, parts: Sequence[ShardPart], degree: int, *, heads: HeadCounts | None = None, grain: int = 1
) -> DimShards:
    """Cut a dim of `size` elements over `degree` ranks.

    Args:
        parts: Its parts in order; sizes that are not given are worked out.
        heads: Needed by parts of heads.
        grain: Elements that stay together in parts without heads, fewer where ranks would have none; what is left of a part
            goes to its last rank.
    Raises:
        PlanError: parts do not fill the dim or are no whole number of units ("tensor-parts"); heads do not fit ("tensor-heads").
    """
    sizes = _sizes(size, parts, heads)
    ranges, start = [], 0
    for part, length in zip(parts, sizes, strict=True):
        ranges.append(tuple((start + a, start + b) for a, b in _stretches(part.unit, length, degree, heads, grain)))
        start += length
    return DimShards(dim, size, tuple(ranges))


def _stretches(unit: HeadUnit, length: int, degree: int, heads: HeadCounts | None, grain: int) -> list[Stretch]:
    if unit is HeadUnit.GRAIN:
        while grain > 1 and length < grain * degree:
            grain //= 2
        if length < degree:
            raise PlanError(
                f"{length} elements cannot be cut over {degree} ranks", code="tensor-parts", fix="Skip this layer."
            )
        bounds = [(a * grain, b * grain) for a, b in spread(length // grain, degree)]
        return [*bounds[:-1], (bounds[-1][0], length)]
    counts = _need(heads)
    count = counts.query if unit is HeadUnit.QUERY else counts.key_value
    if unit is HeadUnit.GROUP and degree > count:
        raise PlanError(
            f"{count} {unit.value}, interleaved in one weight, cannot be given to {degree} tensor-parallel ranks",
            code="tensor-heads",
            fix=f"Use at most {count} tensor-parallel ranks for this model.",
        )
    if length % count:
        raise PlanError(
            f"a part of {length} elements is no whole number for each of {count} {unit.value}",
            code="tensor-parts",
            fix="Give the sizes of the parts, or skip this layer.",
        )
    each, which = length // count, 0 if unit is HeadUnit.QUERY else 1
    return [(pair[which][0] * each, pair[which][1] * each) for pair in counts.stretches(degree)]


def _sizes(size: int, parts: Sequence[ShardPart], heads: HeadCounts | None) -> list[int]:
    """Return every part's elements; parts without a size share the rest, in proportion to their heads or equally."""
    left = size - sum(part.size or 0 for part in parts)
    open_parts = [part for part in parts if part.size is None]
    weights = {part.unit: _weight(part.unit, open_parts, heads) for part in open_parts}
    total = sum(weights[part.unit] for part in open_parts)
    if left < 0 or (not open_parts and left) or (open_parts and left % total):
        raise PlanError(
            f"a dim of {size} elements is not what its {len(parts)} parts add up to: {[part.size for part in parts]}",
            code="tensor-parts",
            fix="Give sizes that add up, with at most one left open.",
        )
    return [left // total * weights[part.unit] if part.size is None else part.size for part in parts]


def _weight(unit: HeadUnit, parts: Sequence[ShardPart], heads: HeadCounts | None) -> int:
    if all(part.unit is unit for part in parts):
        return 1
    counts = _need(heads)
    return counts.query if unit is HeadUnit.QUERY else counts.key_value


def _need(heads: HeadCounts | None) -> HeadCounts:
    if heads is None:
        raise PlanError(
            "a layer is cut by heads, and how many there are is not known",
            code="tensor-heads",
            fix="Give sizes of its parts in partition_config, or skip it.",
        )
    return heads
