"""`deepspeed.utils.torch`: which torch this is; and what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "jit_script_compat",
    "required_max_torch_version",
    "required_min_torch_version",
    "required_torch_version",
]


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is at least, and at most, a version written as a number (2.11 is two point eleven)."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low = min_version is None or found >= _parts(min_version)
    return low and (max_version is None or found <= _parts(max_version))


def _parts(version: float) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))


def required_min_torch_version(min_version: float) -> bool:
    """`required_torch_version(min_version=...)`."""
    return required_torch_version(min_version=min_version)


def required_max_torch_version(max_version: float) -> bool:
    """`required_torch_version(max_version=...)`."""
    return required_torch_version(max_version=max_version)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, compiled where torch.compile can: scripting is no longer developed."""
    return torch.compile(fn)
