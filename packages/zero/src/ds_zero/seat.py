"""Data that both halves of a unit, its parameters (`unit.py`) and its gradients (`gradients.py`), are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_zero.host import HostMemory
from ds_zero.layout import UnitLayout
from ds_zero.nodes import Route
from ds_zero.precision import Dtypes
from ds_zero.store import Pool
from ds_zero.units import UnitSpec

__all__ = ["Members", "Seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """What the units of one model share.

    Attributes:
        shards: The ranks that hold the shards of a unit; a group of one holds it whole.
        gathers: The same ranks, over channels of their own, so that gathers and reductions cannot get in each other's order.
        replicas: The ranks that hold the same shard; gradients are summed over `shards` and then over `replicas`.
        pool: Where gradient buffers come from.
        host: Memory that the ranks of `shards` share; None where they share none.
        route: How gathers go between nodes; None: flat.
    """

    shards: comm.Group
    gathers: comm.Group
    replicas: comm.Group
    pool: Pool
    host: HostMemory | None = None
    route: Route | None = None

    @property
    def size(self) -> int:
        """Ranks a gradient is averaged over."""
        return self.shards.size * self.replicas.size


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The parameters of one unit and how they lie in it.

    Attributes:
        number: Of the unit, in its model.
        device: Of all of them, also while they are on meta.
    """

    number: int
    spec: UnitSpec
    params: tuple[Parameter, ...]
    layout: UnitLayout
    dtypes: Dtypes
    device: torch.device
