"""Which sample goes where, in integers.

Words: an *epoch* is one pass over the samples, in an order that depends on seed and epoch only; the *stream* is all epochs one after
the other; a *row* is the next micro x ranks samples of the stream, one microbatch a rank; *taken* is how many samples all ranks
together have taken from the stream, and with seed and length all there is to resume from. It says nothing of ranks, workers or
batches: on any number of ranks, step k has the same samples as long as the train batch is the same.

A row at the end of an epoch is filled up from the next epoch, so every sample is seen exactly once an epoch and every rank has the
same number of microbatches. A *mixture* is a stream whose places belong to several sources in fixed shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_config.option_checks import check_options
from ds_data.permutation import KeyedPermutation, mix_keys

__all__ = ["BlendOrder", "RankBatchSampler", "RankSlice", "SampleStream", "split_ranges"]

Places = NDArray[np.int64]
_BLOCK = 1 << 16  # places of a mixture among which shares are exact


@dataclass(frozen=True, slots=True)
class RankSlice:
    """The part of every row that one rank reads.

    Ranks that differ only in their tensor, sequence or pipeline coordinate have one lane: they read the same samples.

    Attributes:
        rank: This rank among the data-parallel ranks.
        ranks: How many there are.
        micro: Samples of one microbatch on one rank.
    Raises:
        ConfigError: there is no such part ("data-rank-slice").
    """

    rank: int
    ranks: int
    micro: int

    def __post_init__(self) -> None:
        check_options(self)
        if self.micro < 1 or not 0 <= self.rank < self.ranks:
            raise ConfigError(
                f"rank {self.rank} of {self.ranks} ranks that split the batch, with {self.micro} samples each",
                code="data-rank-slice",
                fix="Give the rank among the data-parallel ranks (0 to ranks - 1), not the one in the world, and at least one sample.",
            )

    @property
    def row(self) -> int:
        """Samples that all ranks take together."""
        return self.micro * self.ranks

    def positions(self, start: int) -> range:
        """Positions in the stream of this rank's samples in the row that begins at `start`."""
        first = start + self.rank * self.micro
        return range(first, first + self.micro)


@dataclass(frozen=True, slots=True)
class SampleStream:
    """The endless order of samples. Pure: `sample(position)` is the same on every rank and after every resume.

    Attributes:
        length: Samples there are.
        seed: Of the order.
        shuffle: Whether an epoch is a permutation or the samples' own order.
        multiple: An epoch is cut to a multiple of it (of a shuffled epoch, other samples every time).
    """

    length: int
    seed: int = 1234
    shuffle: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        check_options(self, length=">= 0", multiple=">= 1")

    @property
    def epoch_length(self) -> int:
        """Samples of one epoch."""
        return self.length - self.length % self.multiple

    def sample(self, position: int) -> int:
        """Return the sample at `position`, in constant time and memory."""
        return int(self.samples([position])[0])

    def samples(self, positions: ArrayLike) -> Places:
        """Return the samples at these positions: int64 [k] -> int64 [k]."""
        epochs, places = np.divmod(np.asarray(positions, np.int64), self.epoch_length)
        if not self.shuffle:
            return places
        out = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            out[inside] = KeyedPermutation(self.length, mix_keys(self.seed, int(epoch)))(places[inside])
        return out


@dataclass(frozen=True, slots=True)
class RankBatchSampler:
    """Samples of one rank, one list a row: a `batch_sampler` for torch's DataLoader, whatever number of workers it has.

    Attributes:
        starts: Positions at which rows begin: `range(taken, end, lane.row)`.
    """

    stream: SampleStream
    lane: RankSlice
    starts: range

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            yield self.stream.samples(np.asarray(self.lane.positions(start))).tolist()


@dataclass(frozen=True)
class BlendOrder:
    """Several streams in shares. Of every 65,536 places in a row each source has its exact number, in an order drawn anew.

    Attributes:
        streams: The sources, each read in its own order, epoch after epoch: a small source with a large share is repeated.
        weights: Their shares, in any unit; rounded to 1/65,536.
        seed: Of which place belongs to which.
    Raises:
        ConfigError: no source, another number of weights, a weight that is negative or rounds to nothing ("data-mixture").
    """

    streams: Sequence[SampleStream]
    weights: Sequence[float]
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.streams or len(self.streams) != len(self.weights):
            raise ConfigError(
                f"a mixture of {len(self.streams)} sources has {len(self.weights)} weights",
                code="data-mixture",
                fix="Give one weight a source.",
            )
        small = [weight for weight, quota in zip(self.weights, self.quotas.tolist(), strict=True) if quota < 1]
        if small or not all(map(np.isfinite, self.weights)):
            raise ConfigError(
                f"weights {list(self.weights)}: {small or 'one'} is no share of at least 1/{_BLOCK}",
                code="data-mixture",
                fix="Leave sources out that shall not be read.",
            )

    @cached_property
    def quotas(self) -> Places:
        """int64 [sources]: places of each in a block, by largest remainder."""
        shares = np.maximum(np.asarray(self.weights, np.float64), 0)
        exact = shares / (shares.sum() or 1.0) * _BLOCK
        quotas = np.floor(exact).astype(np.int64)
        rest = _BLOCK - int(quotas.sum())
        quotas[np.argsort(quotas - exact, kind="stable")[: max(0, rest)]] += 1
        return np.where(shares > 0, quotas, 0)

    def samples(self, positions: ArrayLike) -> tuple[Places, Places]:
        """Return the source at each position and the sample of that source: int64 [k] -> int64 [k] each."""
        blocks, slots = np.divmod(np.asarray(positions, np.int64), _BLOCK)
        source, earlier, quotas = np.empty_like(slots), np.empty_like(slots), tuple(self.quotas.tolist())
        for block in np.unique(blocks):
            inside = blocks == block
            layout = _block_layout(quotas, mix_keys(self.seed, 1, int(block)))
            source[inside], earlier[inside] = layout[0][slots[inside]], layout[1][slots[inside]]
        places = blocks * self.quotas[source] + earlier
        out = np.empty_like(places)
        for number, stream in enumerate(self.streams):
            inside = source == number
            out[inside] = stream.samples(places[inside])
        return source, out


@lru_cache(maxsize=16)  # two for each of a few loaders that take turns: 1 MiB each
def _block_layout(quotas: tuple[int, ...], key: int) -> tuple[Places, Places]:
    """Return of each slot of a block its source, and how many slots before it have the same: a source is read in its own order."""
    drawn = KeyedPermutation(_BLOCK, key)(np.arange(_BLOCK, dtype=np.int64))
    source = np.searchsorted(np.cumsum(quotas), drawn, side="right")
    by_source = np.argsort(source, kind="stable")
    earlier = np.empty_like(by_source)
    earlier[by_source] = np.concatenate([np.arange(quota) for quota in quotas])
    return source, earlier


def split_ranges(length: int, shares: Sequence[float]) -> tuple[range, ...]:
    """Split 0..length-1 into ranges in these shares ("969, 30, 1"); each end is rounded, nothing is lost.

    Raises:
        ConfigError: a share is negative, or all are 0 ("data-mixture").
    """
    total = sum(shares)
    if total <= 0 or min(shares) < 0:
        raise ConfigError(f"shares {list(shares)} cut nothing", code="data-mixture", fix="Give shares of 0 or more.")
    ends = [0, *(round(length * part / total) for part in accumulate(shares))]
    return tuple(range(a, b) for a, b in pairwise(ends))
