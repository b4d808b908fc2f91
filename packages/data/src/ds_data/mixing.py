"""Sequences of several sources in fixed shares, as one thing to load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError
from ds_data.packed_sequences import PackedSequences
from ds_data.permutation import mix_keys
from ds_data.sample_order import BlendOrder, SampleStream

__all__ = ["BlendedDataset"]

_ENDLESS = 1 << 62


class BlendedDataset:
    """Sources in shares, each shuffled in epochs of its own. Load it with `TokenLoader(mixed, lane)`.

    Args:
        sources: Sequences of one length.
        weights: Shares of the sequences; see `BlendOrder`.
        seed: Of everything.
    Attributes:
        mixture: Which place is which source's.
        fingerprint: What distinguishes this mixture from others.
    Raises:
        ConfigError: weights that say nothing, or sequences of different length ("data-mixture").
    """

    def __init__(self, sources: Sequence[PackedSequences], weights: Sequence[float], *, seed: int = 1234) -> None:
        lengths = sorted({source.length for source in sources})
        if len(lengths) > 1:
            raise ConfigError(
                f"sequences of {lengths} tokens cannot be in one batch", code="data-mixture", fix="Give one length."
            )
        self.sources = tuple(sources)
        streams = [SampleStream(len(source), mix_keys(seed, 2, number)) for number, source in enumerate(sources)]
        self.mixture = BlendOrder(streams, weights, seed)
        parts = (f"{q}:{source.fingerprint}" for q, source in zip(self.mixture.quotas, sources, strict=True))
        self.fingerprint = f"{seed} " + " ".join(parts)

    def __len__(self) -> int:
        """Return 2**62 places: the mixture is endless."""
        return _ENDLESS

    def batch(self, places: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Read places of the mixture, int64 [k], as arrays int64 [k, length], and `source`, int64 [k]."""
        which, samples = self.mixture.samples(places)
        out: dict[str, NDArray[np.int64]] = {}
        for number, source in enumerate(self.sources):
            inside = which == number
            for name, rows in source.batch(samples[inside]).items():
                out.setdefault(name, np.empty((len(which), source.length), np.int64))[inside] = rows
        return out | {"source": which}
