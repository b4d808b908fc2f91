"""Private names of torch, in one place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["in_backward", "parts_of"]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward that happens now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that make up a tensor subclass; the same tensor if `tensor` is plain."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]
