"""The private torch names this package uses, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["storage_uses"]


def storage_uses(tensor: Tensor) -> int:
    """Count the tensors that share `tensor`'s memory, including `tensor`: Python's, and those that autograd saved."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # ours
