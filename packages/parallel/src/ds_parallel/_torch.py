"""The private torch names this package uses, in one place."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["graph_task", "version_of"]


def graph_task() -> int:
    """Return the number of the backward that runs on this thread, which no other one of the process has; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; views of the same memory share the count."""
    return tensor._version
