"""Private names of torch, in one place."""

from __future__ import annotations

import torch

__all__ = ["in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward that happens now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
