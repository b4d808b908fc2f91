"""The model's values out of the shards: a plain state dict on rank 0, and one file of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_comm import Group, barrier
from ds_zero import GatheredParameters, Sharding

__all__ = ["load_whole", "save_whole", "whole_state"]


def whole_state(
    module: nn.Module, sharding: Sharding, *, dtype: torch.dtype | None, exclude_frozen: bool
) -> dict[str, Tensor]:
    """The state dict of `module` in host memory on rank 0, and {} elsewhere. Collective.

    Args:
        dtype: Format of floating-point values; None is the one they are computed with.
        exclude_frozen: Leave out parameters that need no gradient.
    Names and order are the module's own; tied tensors are one tensor. Cost: one gather of the parameters, unit by unit.
    """
    lead = sharding.group.rank == 0
    copies: dict[int, Tensor] = {}
    for unit in sharding.units:
        with GatheredParameters(unit.params):
            if lead:
                copies |= {id(p): _copy(p, dtype) for p in unit.params}
    if not lead:
        return {}
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and exclude_frozen and not value.requires_grad:
            continue
        if id(value) not in copies:
            copies[id(value)] = _copy(value, dtype)
        state[name] = copies[id(value)]
    return state


def _copy(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", wanted, copy=True)


def save_whole(state: Mapping[str, Tensor], path: Path, group: Group) -> None:
    """Write a state dict that rank 0 has: safetensors, or torch's pickle for other endings. Collective.

    The file is complete or not there. Safetensors hold tied tensors once, under their first name.
    """
    try:
        if group.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            if path.suffix == ".safetensors":
                first: dict[int, str] = {}
                once = {n: t.contiguous() for n, t in state.items() if first.setdefault(id(t), n) == n}
                save_file(once, part, metadata={"format": "pt"})
            else:
                torch.save(dict(state), part)
            os.replace(part, path)
    finally:
        barrier(group=group)


def load_whole(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load a whole state dict, the same on every rank, into a sharded model. Collective.

    Returns: missing and unexpected keys, as torch's `load_state_dict` does.
    """
    with GatheredParameters(module, write=True):
        found = module.load_state_dict(state, strict=strict)
    return list(found.missing_keys), list(found.unexpected_keys)
