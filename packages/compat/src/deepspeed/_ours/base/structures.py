"""Small functions of `deepspeed.runtime.utils` and `deepspeed.compression.helper`: over nested values, and names inside modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._ours.base._torch import tree_leaves
from deepspeed._ours.base.raising import refused
from ds_accel import get_accelerator

noop_context = nullcontext


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items are.

    Raises:
        ConfigError: they differ, or there are none; a RuntimeError, too ("compat-argument").
    """
    unique = set(items)
    if len(unique) != 1:
        raise refused("one-value", sorted(unique, key=repr))
    return unique.pop()


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of all tensors in nested lists, tuples and dicts."""
    return sum(leaf.nbytes for leaf in tree_leaves(item) if isinstance(leaf, Tensor))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether an element is not finite, as a tensor on the device."""
    return ~torch.isfinite(x).all()


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two nested structures have the same form, equal tensors and equal other values."""
    if isinstance(inputs1, Tensor) or isinstance(inputs2, Tensor):
        both = isinstance(inputs1, Tensor) and isinstance(inputs2, Tensor)
        return both and torch.equal(inputs1, inputs2.to(inputs1.device))
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Mapping):
        same = inputs1.keys() == inputs2.keys()
        return same and all(compare_tensors_in_structures(inputs1[key], inputs2[key]) for key in inputs1)
    if isinstance(inputs1, list | tuple):
        same = len(inputs1) == len(inputs2)
        return same and all(map(compare_tensors_in_structures, inputs1, inputs2))
    return bool(inputs1 == inputs2)


def filter_empty_parameters(params: Any) -> Any:
    """Leave out parameters without elements, of a list or of each group's; a parameter stays as it is."""
    if isinstance(params, Tensor):
        return params
    given = list(params)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": filter_empty_parameters(group["params"])} for group in given]
    return [param for param in given if param.numel() > 0]


def get_ma_status() -> int:
    """Return the bytes that the device holds."""
    return get_accelerator().memory().allocated


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return what a dotted name inside a module stands for."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put `module` where a dotted name inside a module points to."""
    parent, _, name = module_name.rpartition(".")
    setattr(attrgetter(parent)(model) if parent else model, name, module)
