"""A permutation of 0..n-1 that is computed, not stored: any place of it in constant time and memory.

A Feistel network (Luby and Rackoff 1988) permutes the numbers of b bits, the fewest that hold n; what lands at n or beyond is sent
through again until it lands below ("cycle walking", Black and Rogaway 2002). Fewer than two passes on average, since 2**b < 2n.
The two halves have b//2 and b - b//2 bits and change places in every round, of which there are eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError

__all__ = ["KeyedPermutation", "hashed", "mix_keys", "uniform"]

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
Words = NDArray[np.uint64]
Places = NDArray[np.int64]


def hashed(words: Words) -> Words:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=1024)
def mix_keys(*numbers: int) -> int:
    """Hash several integers into a 64-bit key; the order counts."""
    key = 0
    for number in numbers:
        key = int(hashed(np.array([(key + (number & _MASK) + _GOLDEN) & _MASK], np.uint64))[0])
    return key


def uniform(key: int, counters: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1), one a counter: the same for the same key and counter, on any rank, in any order."""
    words = np.asarray(counters, np.int64).astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    return (hashed(hashed(words)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class KeyedPermutation:
    """One of the orders of `length` things, chosen by `key`.

    Attributes:
        length: 1 to 2**62.
        key: Any 64-bit integer; see `mix`.
    Raises:
        ConfigError: the length is not in that range ("data-empty").
    """

    length: int
    key: int

    def __post_init__(self) -> None:
        if not 0 < self.length <= 1 << 62:
            raise ConfigError(
                f"there is no order of {self.length} samples", code="data-empty", fix="Give 1 to 2**62 samples."
            )

    def __call__(self, places: ArrayLike) -> Places:
        """Return the elements at these places, each in 0..length-1: int64 [k] -> int64 [k].

        About 0.3 us each in large arrays.
        """
        return self._walk(places, inverse=False)

    def inverse(self, things: ArrayLike) -> Places:
        """Return the places of these elements: int64 [k] -> int64 [k]."""
        return self._walk(things, inverse=True)

    def _walk(self, positions: ArrayLike, *, inverse: bool) -> Places:
        values = np.atleast_1d(np.asarray(positions, np.int64))
        if values.size and (int(values.min()) < 0 or int(values.max()) >= self.length):
            raise IndexError(f"places {int(values.min())} to {int(values.max())} of {self.length}")
        out = self._round_trip(values.astype(np.uint64), inverse)
        while len(beyond := np.flatnonzero(out >= self.length)):
            out[beyond] = self._round_trip(out[beyond], inverse)
        return out.astype(np.int64)

    def _round_trip(self, words: Words, inverse: bool) -> Words:
        bits = max(2, (self.length - 1).bit_length())
        widths = bits // 2, bits - bits // 2  # of the high and the low half, before even rounds
        high, low = words >> np.uint64(widths[1]), words & np.uint64((1 << widths[1]) - 1)
        rounds = range(_ROUNDS)
        for turn in reversed(rounds) if inverse else rounds:
            key = np.uint64((self.key + (turn + 1) * _GOLDEN) & _MASK)
            mask = np.uint64((1 << widths[turn % 2]) - 1)
            if inverse:
                high, low = low ^ (hashed(hashed(high + key)) & mask), high
            else:
                high, low = low, high ^ (hashed(hashed(low + key)) & mask)
        return (high << np.uint64(widths[1])) | low
