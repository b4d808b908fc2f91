"""Which processor cores each rank of a host may use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_config.errors import ConfigError

__all__ = ["parse_range", "parse_ranges", "share_cores"]


def parse_range(rng: str) -> range:
    """Parse the range "3" or "2-4", both ends included.

    Raises:
        ConfigError: the text is neither ("launch-cores").
    """
    first, dash, last = rng.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise _bad(rng, "a range is a number, or two with a dash between, the smaller one first")
    return range(int(first), int(last or first) + 1)


def parse_ranges(text: str) -> tuple[int, ...]:
    """Parse the numbers of "0,2-4": ranges in ascending order that do not overlap.

    Raises:
        ConfigError: the ranges descend or overlap ("launch-cores").
    """
    ranges = [parse_range(part.strip()) for part in text.split(",")]
    if any(after[0] <= before[-1] for before, after in pairwise(ranges)):
        raise _bad(text, "ranges must ascend and not overlap")
    return tuple(number for part in ranges for number in part)


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"bad range {text!r}: {why}", code="launch-cores", fix='As in "0,2-4,6".')


def share_cores(cores: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign neighbouring cores to each rank, the same number to all; leftover cores stay idle.

    Raises:
        ConfigError: fewer cores than ranks ("launch-cores").
    """
    each = len(cores) // ranks
    if each < 1:
        raise ConfigError(
            f"{ranks} ranks share {len(cores)} cores",
            code="launch-cores",
            fix="Give a core to each rank, or bind none.",
        )
    return tuple(tuple(cores[each * rank : each * (rank + 1)]) for rank in range(ranks))
