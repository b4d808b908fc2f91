"""The private torch names this package uses, in one place."""

from __future__ import annotations

from torch import Tensor

__all__ = ["version_of"]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; views of the same memory count together."""
    return tensor._version
