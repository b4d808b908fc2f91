"""A parameter cut over the ranks before there are units: what `Init` leaves of it, until `shard` takes it over.

Words: a *scattered* parameter is flat, padded to a multiple of the ranks, and each rank keeps an equal chunk. Using it anywhere
gathers it, lets the use happen, and scatters it again with what the use wrote: `nn.init`, `copy_`, a parent's `apply`. If the
use leaves a view of it behind, it stays whole until `settle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_zero._torch import storage_uses
from ds_zero.released import Keeper, Released, keep, keeper_of, release, restore, unkeep

__all__ = ["Scatter", "is_scattered", "whole"]


_RECORD = "_ds_zero_scatter"


@dataclass(slots=True)
class _Record:
    """On a scattered parameter: the flat buffer it is a view of, this rank's chunk, its name."""

    full: Tensor
    chunk: Tensor
    name: str


class Scatter(Keeper):
    """Scatters parameters over `group` and is their keeper until somebody takes them over.

    Values of rank 0 win. Cost per parameter: its bytes once to scatter it, twice more for each use.
    """

    def __init__(self, group: comm.Group) -> None:
        self.group = group
        self._open: list[Parameter] = []

    def take(self, param: Parameter, name: str) -> None:
        """Keep this rank's chunk of `param` only. Collective."""
        if _RECORD in param.__dict__ or param.is_meta:
            return
        padded = -(-param.numel() // self.group.size) * self.group.size
        full = torch.zeros(padded, dtype=param.dtype, device=param.device)
        full[: param.numel()].view(param.shape).copy_(param.data)
        param.data = full[: param.numel()].view(param.shape)
        # The record is on the parameter, not in a table by id: modules replace parameters, and ids are used again.
        param.__dict__[_RECORD] = _Record(full, full[:0], name)
        keep(param, self)
        self._scatter(param)

    def settle(self) -> None:
        """Scatter again what views kept whole. Collective: every rank made the same uses."""
        for param in list(self._open):
            self._scatter(param)

    def give(self, param: Parameter) -> None:
        """Forget `param`, which is whole now."""
        self._close(param)
        param.__dict__.pop(_RECORD, None)
        unkeep(param)

    # Keeper

    def name_of(self, param: Parameter) -> str:
        return self._record(param).name

    def touched(self, param: Parameter, what: str) -> bool:
        del what
        self.gather(param)
        return True

    def used(self, param: Parameter) -> None:
        """Keeper: the use is over; scatter again unless it left a view."""
        record = param.__dict__.get(_RECORD)
        is_open = any(p is param for p in self._open)
        if record is not None and is_open and storage_uses(record.full) <= 2:  # the buffer and the parameter
            self._scatter(param)

    def gather(self, param: Parameter) -> None:
        """Make `param` whole on every rank. Collective."""
        record = self._record(param)
        record.full.untyped_storage().resize_(record.full.numel() * record.full.element_size())
        with torch.no_grad():
            comm.all_gather_single(record.full, record.chunk, self.group, unit=record.name)
        restore(param)
        self._open.append(param)

    @staticmethod
    def _record(param: Parameter) -> _Record:
        record: _Record = param.__dict__[_RECORD]
        return record

    def _close(self, param: Parameter) -> None:
        self._open = [p for p in self._open if p is not param]

    def _scatter(self, param: Parameter) -> None:
        record, rank = self._record(param), self.group.rank
        with torch.no_grad():
            comm.broadcast(record.full, group=self.group, group_src=0, unit=record.name)
            chunk = record.full.numel() // self.group.size
            record.chunk = record.full[rank * chunk : (rank + 1) * chunk].clone()
        self._close(param)
        record.full.untyped_storage().resize_(0)
        release(param)


def is_scattered(param: Tensor) -> bool:
    """Whether `Init` left only a chunk of `param` on this rank."""
    return isinstance(keeper_of(param), Scatter)


@contextmanager
def whole(param: Parameter) -> Iterator[Tensor]:
    """The values of a parameter that is about to be adopted by a unit; a scattered one is whole inside and free after. Collective."""
    keeper = keeper_of(param)
    if not isinstance(keeper, Scatter):
        yield param.data
        return
    if type(param) is Released:
        keeper.gather(param)
    yield param.data
    keeper.give(param)
