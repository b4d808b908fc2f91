"""Is a token file what it should be: every value looked at once. For `ds data check`."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np

from ds_data.codes import Table
from ds_data.tokens import TokenFile

__all__ = ["TokenFileReport", "check_tokens"]

_BLOCK = 1 << 22  # values that are looked at together


@dataclass(frozen=True, slots=True)
class TokenFileReport:
    """What was found in a token file.

    Attributes:
        prefix: Common name of the files.
        dtype: Format of the values.
        items, documents, tokens: Counts.
        empty: Items without values.
        shortest, longest: Values of an item; 0 without items.
        low, high: Smallest and largest value; 0 without values.
        unused: Values of the data file that no item holds.
        overlaps: Items that begin before the one before them ends.
        fingerprint: See `TokenFile.fingerprint`.
        problems: What a training on it would stumble over; empty when all is well.
    """

    prefix: str
    dtype: str
    items: int
    documents: int
    tokens: int
    empty: int
    shortest: int
    longest: int
    low: float
    high: float
    unused: int
    overlaps: int
    fingerprint: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        rows = {
            "file": f"{self.prefix}  ({self.dtype}, fingerprint {self.fingerprint})",
            "items": f"{self.items:,} in {self.documents:,} documents, {self.shortest:,} to {self.longest:,} values, {self.empty:,} empty",
            "values": f"{self.tokens:,}, {self.low:g} to {self.high:g}; {self.unused:,} belong to no item",
            "problems": "none" if not self.problems else "; ".join(self.problems),
        }
        return "\n".join(f"{name:<9} {text}" for name, text in rows.items())


def check_tokens(
    path: str | PathLike[str], *, vocabulary: int | None = None, table: Table | None = None
) -> TokenFileReport:
    """Look at a whole token file.

    Args:
        vocabulary: How many ids there are; a larger id is a problem.
        table: As for `TokenFile`.
    Raises:
        ConfigError: the file is not usable at all; see `TokenFile`.
    Cost: reads the file once, in blocks.
    """
    file = TokenFile(path, table=table)
    starts, sizes = file.index.starts, file.sizes
    ends = starts + sizes
    low, high = np.inf, -np.inf
    for at in range(0, len(file.values), _BLOCK):
        block = file.values[at : at + _BLOCK]
        low, high = min(low, block.min()), max(high, block.max())
    if not len(file.values):
        low = high = 0
    overlaps = int((starts[1:] < ends[:-1]).sum())
    problems = []
    if not file.num_tokens:
        problems.append("there is not one value")
    if low < 0:
        problems.append(f"there are negative values, down to {low:g}")
    if vocabulary is not None and high >= vocabulary:
        problems.append(f"ids go up to {high:g}, the vocabulary ends at {vocabulary - 1}")
    if overlaps:
        problems.append(f"{overlaps} items overlap the one before them")
    return TokenFileReport(
        prefix=file.prefix,
        dtype=str(file.dtype),
        items=len(file),
        documents=len(file.index.bounds) - 1,
        tokens=file.num_tokens,
        empty=int((sizes == 0).sum()),
        shortest=int(sizes.min()) if len(sizes) else 0,
        longest=int(sizes.max()) if len(sizes) else 0,
        low=float(low),
        high=float(high),
        unused=max(0, len(file.values) - file.num_tokens),
        overlaps=overlaps,
        fingerprint=file.fingerprint,
        problems=tuple(problems),
    )
