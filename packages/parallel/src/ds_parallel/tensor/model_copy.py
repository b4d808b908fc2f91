"""A copy of a model whose code may run in the place of the model's: its forward writes counters, buffers and lists of the copy.

Parameters are the model's own; a symbolic trace never writes them. What cannot be copied (a process group, an open file) is the model's own,
too, and so is what a module does not hold: a global variable, a variable of a closure.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

__all__ = ["copy_model"]


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model's modules, buffers and plain attributes; the copy has the model's own parameters.

    Returns:
        A model of the same classes, under the same names.
    Cost: the memory of all buffers.
    """
    memo: dict[int, Any] = {id(param): param for param in model.parameters()}
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
        for value in vars(module).values():
            if isinstance(value, torch.Generator):  # which deepcopy refuses
                memo[id(value)] = value.clone_state()
    for module in modules:
        shell = memo[id(module)]
        for key, value in vars(module).items():
            vars(shell)[key] = _copy_value(value, memo)
    copied: nn.Module = memo[id(model)]
    return copied


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an attribute; return the attribute itself where it refuses to be copied."""
    if type(value) is dict and id(value) not in memo:  # buffers and children: one that refuses does not keep the others
        copied: dict[Any, Any] = {}
        memo[id(value)] = copied
        copied.update((key, _copy_value(item, memo)) for key, item in value.items())
        return copied
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a foreign object raises
        if isinstance(value, torch.Tensor):  # a result with a graph
            memo[id(value)] = copied_tensor = value.detach().clone()
            return copied_tensor
        return value
