"""Optimizer state between two plans of the same model: cut one way, it is put together and cut another way.

Words: a *fragment* is what this rank has of one state tensor of one parameter: a range of it, or all of it where the state does
not have the parameter's elements (the row and column sums of Adafactor). Whole tensors exist one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Group
from ds_zero.layout.elements import Piece

__all__ = ["Fragment", "assemble", "fragments", "names_of"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + n) of the flattened state `key`, whose whole has `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    data: Tensor


def fragments(states: Iterable[tuple[str, Piece, Tensor]]) -> dict[str, list[Fragment]]:
    """Copies of this rank's state, as (key, elements, values), by name of the parameter. Cost: the state's bytes on this rank."""
    found: dict[str, list[Fragment]] = {}
    for key, piece, data in states:
        each = data.numel() == piece.interval.numel
        shape, start = (piece.shape, piece.interval.start) if each else (tuple(data.shape), 0)
        found.setdefault(piece.name, []).append(Fragment(key, shape, start, data.clone()))
    return found


def names_of(mine: Mapping[str, list[Fragment]], group: Group, names: Collection[str]) -> set[str]:
    """Parameters out of `names` of which some rank has state. Collective."""
    everyone = comm.all_gather_json(sorted(set(mine) & set(names)), group, unit="replan")
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
