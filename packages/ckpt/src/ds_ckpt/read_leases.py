"""Checkpoints that are being read are not removed: a small file in `.readers/` of the root says which, and until when."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from typing import Final

__all__ = ["READERS", "held_tags", "hold_name"]

READERS: Final = ".readers"


def hold_name(tag: str, seconds: float) -> str:
    """Build the file name of a read lease on checkpoint `tag` that expires after `seconds`."""
    return f"{tag}@{time.time() + seconds:.0f}@{secrets.token_hex(8)}"


def held_tags(names: Collection[str]) -> set[str]:
    """Tags that files of these names hold now."""
    leased = set()
    for name in names:
        tag, _, rest = name.partition("@")
        until = rest.partition("@")[0]
        if until.isdigit() and int(until) > time.time():
            leased.add(tag)
    return leased
