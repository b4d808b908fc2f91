"""What the process that workers are forked from has done once: torch is imported, so that a worker starts in milliseconds."""

from __future__ import annotations

import gc

import torch
import torch._dynamo  # any optimizer imports it; inside a test it would capture the test's group and set variables

__all__ = ["settle"]


def settle() -> None:
    """One thread an operation; torch's own objects are left out of later collections, which look only at what tests make."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


settle()
