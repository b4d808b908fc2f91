"""Moving batches to where the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same structure of tuples, lists and dicts with every tensor on `device`; other leaves as they are.

    Args:
        dtype: Format of floating-point tensors; None leaves them as they are.
    A pinned host tensor is copied without blocking. A tensor that is there already is not copied.
    """
    if isinstance(value, Tensor):
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        same = value.device == device and value.dtype == cast
        return value if same else value.to(device, cast, non_blocking=value.is_pinned())
    if isinstance(value, tuple):
        moved = [to_device(item, device, dtype) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(item, device, dtype) for item in value]
    if isinstance(value, Mapping):
        changed = {key: to_device(item, device, dtype) for key, item in value.items()}
        return changed if type(value) is dict else _rebuilt(value, changed)
    return value


def _rebuilt(old: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    # Batches of tokenizers are mappings with methods of their own: change a copy, keep the class.
    copied = getattr(old, "copy", None)
    if copied is None:
        return values
    new = copied()
    for key, value in values.items():
        new[key] = value
    return new
