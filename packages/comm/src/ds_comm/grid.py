"""Ranks as points of a grid with named axes: pure arithmetic, no process group.

Row-major: the last axis varies fastest, so ranks next to each other differ in the last axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["RankGrid"]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """`prod(sizes)` ranks, numbered row-major over `axes`.

    Attributes:
        axes: Axis names, outermost (slowest) first.
        sizes: Ranks along each axis, at least 1.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes) or min(self.sizes, default=1) < 1:
            raise ValueError(f"a grid needs distinct axes with one size >= 1 each, got {self.axes} and {self.sizes}")

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes[self._index(axis)]

    def rank(self, **coordinate: int) -> int:
        """Return the rank at `coordinate`, which has an index for every axis."""
        if set(coordinate) != set(self.axes):
            raise ValueError(f"a coordinate needs exactly the axes {self.axes}, got {tuple(coordinate)}")
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not 0 <= coordinate[axis] < size:
                raise ValueError(f"{axis}={coordinate[axis]} is outside 0..{size - 1}")
            rank = rank * size + coordinate[axis]
        return rank

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index along each axis of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        out: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, out[axis] = divmod(rank, size)
        return {axis: out[axis] for axis in self.axes}

    def filter_match(self, **coordinate: int) -> list[int]:
        """Ranks whose coordinate has these values, in rising order. Axes not named are free."""
        for axis in coordinate:
            self._index(axis)
        if any(not 0 <= index < self.size(axis) for axis, index in coordinate.items()):
            return []
        base = sum(index * self._stride(axis) for axis, index in coordinate.items())
        return [base + offset for offset in self._offsets([axis for axis in self.axes if axis not in coordinate])]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Sets of ranks that differ only in `axes`; together they are all ranks, each once.

        Both the list and each group are in rising order of rank: every process derives the same list.
        """
        for axis in axes:
            self._index(axis)
        along = self._offsets([axis for axis in self.axes if axis in axes])
        across = self._offsets([axis for axis in self.axes if axis not in axes])
        return [tuple(base + offset for offset in along) for base in across]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group among `groups(*axes)` that contains `rank`."""
        at = self.coordinate(rank)
        return tuple(self.filter_match(**{axis: index for axis, index in at.items() if axis not in axes}))

    def describe(self, rank: int, omit: Iterable[str] = (), inner: str = "=", outer: str = " ") -> str:
        """`pipe=1 data=0`: the coordinate as text; axes of size 1 and those in `omit` are left out."""
        skip = set(omit)
        return outer.join(
            f"{axis}{inner}{index}"
            for axis, index in self.coordinate(rank).items()
            if axis not in skip and self.size(axis) > 1
        )

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"no axis {axis!r}; this grid has {self.axes}")
        return self.axes.index(axis)

    def _stride(self, axis: str) -> int:
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Sums of the steps along `axes`, given in the grid's order: rising, because outer steps are larger."""
        steps = [[index * self._stride(axis) for index in range(self.size(axis))] for axis in axes]
        return [sum(point) for point in itertools.product(*steps)]
