"""What this package needs of torch that torch does not promise to keep."""

from __future__ import annotations

import torch

__all__ = ["in_backward"]


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
