"""Tensors inside nested arguments: taken out, and put back. Lists, tuples (named ones too) and dicts are looked into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["flatten", "tensors_in"]


def flatten(tree: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of `tree` in order, and a function that rebuilds the tree with other tensors.

    The function holds none of the tensors.
    """
    tensors: list[Tensor] = []
    build = _builder(tree, tensors)
    return tensors, build


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of `tree` in order."""
    return flatten(tree)[0]


def _builder(tree: Any, leaves: list[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    if isinstance(tree, Tensor):
        at = len(leaves)
        leaves.append(tree)
        return lambda tensors: tensors[at]
    kind = type(tree)
    if kind is dict:
        builders = {key: _builder(value, leaves) for key, value in tree.items()}
        return lambda tensors: {key: build(tensors) for key, build in builders.items()}
    if kind in (list, tuple) or (isinstance(tree, tuple) and hasattr(kind, "_fields")):
        members = [_builder(value, leaves) for value in tree]
        if hasattr(kind, "_fields"):
            return lambda tensors: kind(*(build(tensors) for build in members))
        return lambda tensors: kind(build(tensors) for build in members)
    return lambda tensors: tree
