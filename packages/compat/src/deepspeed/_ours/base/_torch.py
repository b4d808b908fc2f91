"""The private torch names this package uses, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "accumulates",
    "compilers",
    "flatten",
    "is_fake",
    "transformed",
    "tree_leaves",
    "tree_map",
    "unflatten",
    "used_in_backward",
]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all tensors into a flat tensor."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> Any:
    """Split a flat tensor into tensors with the shapes of `tensors`."""
    return _unflatten_dense_tensors(flat, tensors)


def used_in_backward(parameters: Iterable[Tensor]) -> int | None:
    """Count the parameters that the running backward computes a gradient of; None if none runs."""
    if torch._C._current_graph_task_id() == -1:
        return None
    with torch.enable_grad():
        nodes = {torch.autograd.graph._get_grad_fn_or_grad_acc(p) for p in parameters if p.requires_grad}
    return sum(map(torch._C._will_engine_execute_node, nodes))


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Whether the running backward adds to `grad` of some parameter; `torch.autograd.grad` does not. A few us a parameter before the first that it adds to."""
    node = torch.autograd.graph._get_grad_fn_or_grad_acc
    try:
        with torch.enable_grad():
            return any(torch._C._will_engine_execute_node(node(p)) for p in parameters if p.requires_grad)
    except RuntimeError:  # one is asked for alone
        return False


def compilers() -> list[str]:
    """Names of the backends of torch.compile."""
    return torch._dynamo.list_backends(exclude_tags=())


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running, which differentiates in its own way."""
    return torch._C._functorch.peek_interpreter_stack() is not None
