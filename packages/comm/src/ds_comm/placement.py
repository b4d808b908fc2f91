"""Where the elements of a logical tensor live: the vocabulary that `ds-zero` gives and `ds-ckpt` takes. Pure arithmetic.

Words: a *logical tensor* has a name, a global shape and a dtype, whatever the number of ranks. A *placement* says what
one mesh axis does to it: `Shard(dim)`, `Replicate()`, `Partial(op)`. A *box* is the rectangular part that placements
leave a rank (offset and size per dim): tensor or expert parallelism. An *interval* is a range of the flattened box, in
elements: what ZeRO leaves on a rank. A `TensorShard` is a box and an interval, and is all that a checkpoint or a
reshard needs to know about who owns what; a `LocalShard` is one together with its elements.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "Interval", "LocalShard", "Partial", "Placement", "Replicate", "Shard", "TensorShard", "local_box"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is cut into equal chunks along the axis (the last ones shorter or empty, as `torch.chunk` and DTensor do)."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds all of it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis holds a term; the value is their reduction with `op` (`"sum"`, `"avg"`, `"max"`, `"min"`)."""

    op: str = "sum"


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Elements `start <= i < stop`. An empty interval has `start == stop`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"an interval needs 0 <= start <= stop, got {self.start}..{self.stop}")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Interval) -> Interval:
        """Return the common part; empty (at this interval's start) when there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else Interval(self.start, self.start)

    def shifted(self, by: int) -> Interval:
        """Return this interval moved by `by` elements, of the same length."""
        return Interval(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim. A scalar's has no dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or any(o < 0 for o in self.offset) or any(s < 0 for s in self.shape):
            raise ValueError(
                f"a box needs one non-negative offset and size per dim, got {self.offset} and {self.shape}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """Return the common box, or None when the boxes share no element."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= low for low, h in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))

    def position(self, index: Sequence[int]) -> int:
        """Return the row-major offset of the tensor's element `index` in this box."""
        at = 0
        for i, o, n in zip(index, self.offset, self.shape, strict=True):
            at = at * n + i - o
        return at


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What one rank holds of one logical tensor.

    Attributes:
        name: Logical name, the same on every rank and for every layout (`param/blocks.0.attn.weight`).
        shape: Global shape of the logical tensor.
        dtype: torch's name without the prefix (`"float32"`, `"bfloat16"`).
        box: The rectangular part this rank's axes leave it (the whole tensor without tensor or expert parallelism).
        interval: Elements of the flattened box that this rank holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    interval: Interval

    def __post_init__(self) -> None:
        inside = len(self.box.shape) == len(self.shape) and all(
            o + s <= n for o, s, n in zip(self.box.offset, self.box.shape, self.shape, strict=True)
        )
        if not inside or self.interval.stop > self.box.numel:
            raise ValueError(f"{self.name}: {self.box} and {self.interval} do not fit shape {self.shape}")

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: str) -> TensorShard:
        """Return the shard of a rank that holds the full tensor."""
        return cls.flat(name, shape, dtype, Interval(0, math.prod(shape)))

    @classmethod
    def flat(cls, name: str, shape: Sequence[int], dtype: str, interval: Interval) -> TensorShard:
        """Return the shard `interval` of the whole flattened tensor, as in ZeRO's flat layout."""
        return cls(name, tuple(shape), dtype, Box.whole(shape), interval)

    @property
    def numel(self) -> int:
        """Elements held by this rank."""
        return self.interval.numel

    def overlap(self, other: TensorShard) -> Iterator[tuple[Interval, Interval]]:
        """Runs of elements that both shards hold: (interval in this shard's data, interval in `other`'s data).

        Positions are relative to each shard's own local elements, in rising order of both. Every common element is in
        exactly one run. Cost: one run when the boxes are equal; at most one per row of the common box otherwise, and
        rows that neither interval reaches are skipped by bisection.
        """
        if self.name != other.name or self.shape != other.shape:
            raise ValueError(f"shards of different tensors: {self.name}{self.shape} and {other.name}{other.shape}")
        common = self.box & other.box
        if common is None:
            return
        rows = _SharedRuns.of(common, self.box, other.box)
        first = max(rows.first_after(self.box, self.interval.start), rows.first_after(other.box, other.interval.start))
        for row in range(first, rows.count):
            start, other_start = rows.start(self.box, row), rows.start(other.box, row)
            if start >= self.interval.stop or other_start >= other.interval.stop:
                return
            run = Interval(start, start + rows.width) & self.interval
            both = run.shifted(other_start - start) & other.interval
            if both.numel:
                yield both.shifted(start - other_start - self.interval.start), both.shifted(-other.interval.start)


@dataclass(frozen=True, slots=True)
class _SharedRuns:
    """A common box as `count` runs of `width` elements, each contiguous in both boxes that share it.

    Attributes:
        common: The common box.
        outer: How many leading dims are stepped through; the dims after them travel as one run.
    """

    common: Box
    outer: int
    count: int
    width: int

    @classmethod
    def of(cls, common: Box, box: Box, other_box: Box) -> _SharedRuns:
        outer = len(common.shape)
        while outer > 0 and common.shape[outer - 1] == box.shape[outer - 1] == other_box.shape[outer - 1]:
            outer -= 1  # this dim is covered fully on both sides: it joins the run
        outer = max(outer - 1, 0)  # the last dim that is not covered fully is still contiguous
        return cls(common, outer, math.prod(common.shape[:outer]), math.prod(common.shape[outer:]))

    def start(self, box: Box, row: int) -> int:
        """Return the offset of run `row` in `box` flattened; rises with `row`."""
        index = list(self.common.offset)
        for dim in reversed(range(self.outer)):
            row, step = divmod(row, self.common.shape[dim])
            index[dim] += step
        return box.position(index)

    def first_after(self, box: Box, element: int) -> int:
        """Return the first run that ends after `element` of `box` flattened."""
        return bisect_right(range(self.count), element - self.width, key=lambda row: self.start(box, row))


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """The elements of `shard` that this rank holds.

    Attributes:
        data: [shard.numel], 1-D, contiguous, of the shard's dtype; reading and writing it reads and writes the owner's memory.
    """

    shard: TensorShard
    data: Tensor

    def __post_init__(self) -> None:
        layout = (tuple(self.data.shape), str(self.data.dtype).removeprefix("torch."), self.data.is_contiguous())
        if layout != ((self.shard.numel,), self.shard.dtype, True):
            raise ValueError(
                f"{self.shard.name}: data must be contiguous, of shape ({self.shard.numel},) and {self.shard.dtype}; "
                f"got shape {layout[0]}, {layout[1]}, contiguous={layout[2]}"
            )


def local_box(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """Return the box that `placements` leave to the rank at `coordinate`.

    Args:
        shape: Global shape.
        placements: One per mesh axis, outermost axis first; a dim that two axes shard is split by the first, then the
            rest of it by the second.
        sizes: Size of each of these axes.
        coordinate: This rank's index along each.
    """
    offset, size = [0] * len(shape), list(shape)
    for placement, axis_size, index in zip(placements, sizes, coordinate, strict=True):
        if not isinstance(placement, Shard):
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"{placement} of a tensor with shape {tuple(shape)}")
        dim = placement.dim % len(shape)
        chunk = -(-size[dim] // axis_size)
        start = min(chunk * index, size[dim])
        offset[dim] += start
        size[dim] = min(chunk, size[dim] - start)
    return Box(tuple(offset), tuple(size))
