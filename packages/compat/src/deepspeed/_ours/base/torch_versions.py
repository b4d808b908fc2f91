"""`deepspeed.utils.torch`: which torch this is; and what it does."""

from __future__ import annotations

import torch


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least, and at most, a version written as a number (2.11 is two point eleven)."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low = min_version is None or version >= _parts(min_version)
    return low and (max_version is None or version <= _parts(max_version))


def _parts(version: float) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))
