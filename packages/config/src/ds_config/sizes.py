"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import argparse
import re

__all__ = ["bytes_text", "parse_bytes", "positive_size", "size_argument"]

_UNITS = ("", "K", "M", "G", "T", "P")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(iB|B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse `4096`, `64K` and `64KiB` (powers of 1024) or `5GB` (powers of 1000) into bytes, rounded down.

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write bytes, or 64K, 16MiB, 5GB")
    number, unit, ending = match.groups()
    base = 1000 if (ending or "").upper() == "B" else 1024
    factor = base ** _UNITS.index(unit.upper())
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def size_argument(text: str) -> int:
    """`parse_bytes` as the type of a command line's argument."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_size(text: str) -> int:
    """Parse a size argument as `size_argument` does, and refuse 0."""
    value = size_argument(text)
    if value == 0:
        raise argparse.ArgumentTypeError("a size of 0 bytes")
    return value


def bytes_text(nbytes: float) -> str:
    """Format bytes in powers of 1024 with at most four digits: `512 B`, `1.5 GiB`."""
    value, unit = float(nbytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}{'iB' if unit else 'B'}"
