"""Where the elements of a logical tensor live: the vocabulary that `ds-zero` gives and `ds-ckpt` takes. No torch.

Words: a *logical tensor* has a name, a global shape and a dtype, whatever the number of ranks. A *box* is a rectangular
part of it (offset and size per dim): what tensor or expert parallelism leaves on a rank. An *interval* is a range of the
flattened box, in elements: what ZeRO leaves on a rank. A `TensorShard` is both, and is all that a checkpoint or a
reshard needs to know about who owns what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box", "Interval", "TensorShard"]


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
        """The common part; empty (at this interval's start) when there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else Interval(self.start, self.start)

    def shifted(self, by: int) -> Interval:
        """The same length, `by` elements further."""
        return Interval(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or any(o < 0 for o in self.offset) or any(s < 0 for s in self.shape):
            raise ValueError(f"a box needs one non-negative offset and size per dim, got {self.offset} and {self.shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """The common box, or None when they share no element."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= low for low, h in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))

    def runs(self, part: Box) -> Iterator[tuple[Interval, Interval]]:
        """Contiguous runs of `part` (inside this box): (interval in this box flattened, interval in `part` flattened).

        Trailing dims that `part` covers fully are merged, so a row-sharded matrix is one run.
        """
        if (self & part) != part and part.numel:
            raise ValueError(f"{part} is not inside {self}")
        if part.numel == 0:
            return
        dims = len(self.shape)
        inner = dims  # dims inner.. are covered fully: they travel as one run with dim inner-1
        while inner > 0 and part.shape[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        strides = [math.prod(self.shape[d + 1 :]) for d in range(dims)]
        run_dim = max(inner - 1, 0)
        run = math.prod(part.shape[run_dim:]) if dims else 1
        outer = part.shape[:run_dim]
        base = sum((part.offset[d] - self.offset[d]) * strides[d] for d in range(dims))
        for n in range(math.prod(outer)):
            rest, start = n, base
            for d in reversed(range(run_dim)):
                rest, i = divmod(rest, outer[d])
                start += i * strides[d]
            yield Interval(start, start + run), Interval(n * run, (n + 1) * run)


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
    def whole(cls, name: str, shape: tuple[int, ...], dtype: str) -> TensorShard:
        """The shard of a rank that holds everything."""
        return cls(name, tuple(shape), dtype, Box.whole(tuple(shape)), Interval(0, math.prod(shape)))

    @classmethod
    def flat(cls, name: str, shape: tuple[int, ...], dtype: str, interval: Interval) -> TensorShard:
        """`interval` of the whole flattened tensor: what ZeRO's flat layout leaves on a rank."""
        return cls(name, tuple(shape), dtype, Box.whole(tuple(shape)), interval)

    @property
    def numel(self) -> int:
        """Elements held by this rank."""
        return self.interval.numel

    def overlap(self, other: TensorShard) -> Iterator[tuple[Interval, Interval]]:
        """Runs of elements that both shards hold: (interval in this shard's data, interval in `other`'s data).

        Positions are relative to each shard's own local elements, in order of this shard. Cost: one run per row of the
        common box at most; one run in all when both boxes are the whole tensor.
        """
        if self.name != other.name or self.shape != other.shape:
            raise ValueError(f"shards of different tensors: {self.name}{self.shape} and {other.name}{other.shape}")
        if self.box == other.box:  # the common case, and the only one for scalars
            both = self.interval & other.interval
            if both.numel:
                yield both.shifted(-self.interval.start), both.shifted(-other.interval.start)
            return
        common = self.box & other.box
        if common is None:
            return
        for (mine, at), (theirs, _) in zip(self._runs(common), other._runs(common), strict=True):
            # The run length differs between the boxes; cut both to the finer one below.
            del at
            yield from _meet(mine, theirs, self.interval, other.interval)

    def _runs(self, common: Box) -> Iterator[tuple[Interval, Interval]]:
        # One run per row of the last dim keeps both sides aligned whatever their boxes.
        rows = math.prod(common.shape[:-1])
        width = common.shape[-1]
        strides = [math.prod(self.box.shape[d + 1 :]) for d in range(len(self.box.shape))]
        base = sum((common.offset[d] - self.box.offset[d]) * strides[d] for d in range(len(strides)))
        for n in range(rows):
            rest, start = n, base
            for d in reversed(range(len(strides) - 1)):
                rest, i = divmod(rest, common.shape[d])
                start += i * strides[d]
            yield Interval(start, start + width), Interval(n * width, (n + 1) * width)


def _meet(mine: Interval, theirs: Interval, my_part: Interval, their_part: Interval) -> Iterator[tuple[Interval, Interval]]:
    # Positions in `mine` and `theirs` correspond one to one; keep those that both intervals own.
    shift = theirs.start - mine.start
    held = mine & my_part
    if not held.numel:
        return
    both = held.shifted(shift) & their_part
    if both.numel:
        yield both.shifted(-shift - my_part.start), both.shifted(-their_part.start)
