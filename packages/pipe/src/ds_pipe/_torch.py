"""The private torch names this package uses, in one place."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "found_inf_of",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]


def found_inf_of(scaler: GradScaler, optimizer: Optimizer) -> dict[Any, Tensor]:
    """Return a GradScaler's record of an optimizer's inf checks by device; empty before `unscale_`."""
    found: dict[Any, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found
