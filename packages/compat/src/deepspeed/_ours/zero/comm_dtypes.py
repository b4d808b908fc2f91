"""`deepspeed.runtime.torch_autocast`: which parameters' gradients travel in autocast's format, and the attribute that says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ds_zero import Precision

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "get_all_comm_dtypes",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "mark_comm_dtypes",
    "sort_dtypes",
]

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the names of the classes that `lower_precision_safe_modules` stands for where it is left out."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def mark_comm_dtypes(model: nn.Module, precision: Precision) -> None:
    """Set `comm_dtype` on the parameters whose gradients travel in a format of their own."""
    rules = [rule for rule in precision.rules if rule.reduce is not None]
    for name, param in model.named_parameters() if rules else ():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is not None:
            setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, rule.reduce)


def has_comm_dtype(param: Tensor) -> bool:
    """Whether gradients of `param` travel in a format of their own."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """Return the format of `param`'s own, or that of `param`."""
    dtype: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return dtype


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the formats of several parameters."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """Return `dtypes` in the order of their names."""
    return sorted(dtypes, key=str)
