"""Optimizer state between two plans of the same model: cut one way, it is put together and cut another way.

Words: a *fragment* is what this rank has of one state tensor of one parameter: a range of it, or all of it where the state does
not have the parameter's elements (the row and column sums of Adafactor). Whole tensors exist one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Group, LocalShard

__all__ = ["Fragment", "assemble", "fragments", "names_of"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of the flattened state `key`, whose whole has `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    data: Tensor


def fragments(shards: Iterable[LocalShard]) -> dict[str, list[Fragment]]:
    """Copies of this rank's state by name of the parameter. Cost: the state's bytes on this rank."""
    found: dict[str, list[Fragment]] = {}
    for local in shards:
        kind, _, rest = local.shard.name.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optim":
            fragment = Fragment(key, local.shard.shape, local.shard.interval.start, local.data.clone())
            found.setdefault(name, []).append(fragment)
    return found


def names_of(mine: Mapping[str, list[Fragment]], group: Group) -> set[str]:
    """Parameters of which some rank has state. Collective."""
    everyone: list[Any] = [None] * group.size
    comm.all_gather_object(everyone, sorted(mine), group, unit="replan")
    return {name for part in everyone for name in part}


def assemble(mine: Mapping[str, list[Fragment]], name: str, group: Group) -> dict[str, Tensor]:
    """State of one parameter, whole, on every rank. Collective."""
    everyone: list[Any] = [None] * group.size
    comm.all_gather_object(everyone, mine.get(name, []), group, unit=name)
    whole: dict[str, Tensor] = {}
    for fragment in (f for part in everyone for f in part):
        if fragment.key not in whole:
            whole[fragment.key] = torch.zeros(fragment.shape, dtype=fragment.data.dtype, device=fragment.data.device)
        end = fragment.start + fragment.data.numel()
        whole[fragment.key].view(-1)[fragment.start : end] = fragment.data.view(-1)
    return whole
