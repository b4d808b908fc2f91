"""The private torch names this package uses, in one place."""

from __future__ import annotations

from torch import Tensor

__all__ = ["version_of"]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; views of the same memory share the count."""
    return tensor._version
