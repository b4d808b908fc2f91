"""Parameters that `Init` has cut before there are units: each rank keeps a chunk of them, until `shard` takes them over.

A *scattered* parameter is flat, padded to a multiple of the ranks, and each rank keeps an equal chunk. Using it anywhere gathers it, lets
the use happen, and scatters it again with what the use wrote: `nn.init`, `copy_`, a parent's `apply`. If the use leaves a view of it
behind, it stays whole until `settle`. A *pinned* one stays whole: `GatheredParameters` holds it. Its `detach` (`state_dict` calls that)
gives an *alias*: a tensor that shares its memory, and is whole only while it is used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_accel import storage_uses
from ds_comm import param_sharding
from ds_comm.metadata import metadata_device
from ds_comm.placement import Interval
from ds_config.errors import PlanError, ShardedAccessError
from ds_zero._torch import without_torch_function
from ds_zero.runtime.sharded_parameter import (
    AccessHandler,
    ShardedParameter,
    keep,
    keeper_of,
    placeholder_of,
    release,
    restore,
    unkeep,
)

__all__ = [
    "Copier",
    "Scatter",
    "check_scattered",
    "chunk_of",
    "is_scattered",
    "number_of",
    "scatter_of",
    "take_over",
    "whole",
]

_RECORD = "_ds_zero_scatter"
_numbers = itertools.count()


@dataclass(slots=True)
class _Record:
    """On a scattered parameter.

    Attributes:
        full: The flat buffer that the parameter is a view of; without storage while it is scattered.
        chunk: This rank's part; the same tensor for as long as there is a record.
        name: For messages.
        number: Counts what was scattered, the same on every rank.
        pins: How many contexts keep it whole.
        shown: Tensors that `detach` gave.
        pieces: What stretches of the parameter `chunk` holds, until it is first gathered; None: its equal part.
    """

    full: Tensor
    chunk: Tensor
    name: str
    number: int
    pins: int = 0
    shown: list[weakref.ref[Tensor]] = field(default_factory=list)
    pieces: Sequence[Interval] | None = None


class Scatter(AccessHandler):
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
        full = torch.zeros(padded, dtype=param.dtype, device=self._device_for(param))
        full[: param.numel()].view(param.shape).copy_(param.data)
        home, param.data = param.device, full[: param.numel()].view(param.shape)
        # The record is on the parameter, not in a table by id: modules replace parameters, and ids are used again.
        chunk = torch.empty(padded // self.group.size, dtype=full.dtype, device=home)
        param.__dict__[_RECORD] = _Record(full, chunk, name, next(_numbers))
        keep(param, self)
        self._scatter(param)

    def settle(self) -> None:
        """Scatter again what views kept whole. Collective: every rank made the same uses."""
        for param in list(self._open):
            if not self._record(param).pins:
                self._scatter(param)

    def give(self, param: Parameter) -> None:
        """Forget `param` and free the memory it had; give it other memory before it is used again."""
        record = self._record(param)
        self._close(param, record)
        param.__dict__.pop(_RECORD, None)
        unkeep(param)

    def pin(self, param: Parameter) -> None:
        """Make `param` whole on every rank until `unpin`. Collective."""
        self._record(param).pins += 1
        if type(param) is ShardedParameter:
            self.gather(param)

    def unpin(self, param: Parameter, source: int | None, *, alike: bool = False) -> None:
        """End one `pin`; the last one scatters. Collective.

        Args:
            source: The rank whose values become everyone's; None: what was written is dropped.
            alike: Without a source: every rank wrote the same, and keeps its part of it.
        """
        record = self._record(param)
        record.pins -= 1
        with torch.no_grad():
            view = record.full[: param.numel()].view_as(param)
            if param.data_ptr() != view.data_ptr() and param.dtype == view.dtype:  # `param.data = other`
                view.copy_(param)
                param.data = view
        if source is not None or alike:
            self._store(record, source)
        if not record.pins:
            if storage_uses(record.full) > self._known_uses(record):
                self._new_buffer(param, record, record.full.device)  # something taken meanwhile keeps the old one
            self._release(param, record)

    def move(self, param: Parameter, device: torch.device) -> None:
        """Keep the chunk, and make the parameter whole when it is used, on `device`."""
        record = self._record(param)
        if record.full.device == record.chunk.device == device:
            return
        self.settle()
        record.chunk = record.chunk.to(device)
        restore(param)
        self._new_buffer(param, record, device)
        self._release(param, record)

    def name_of(self, param: Parameter) -> str:
        return self._record(param).name

    def on_access(self, param: Parameter, what: str) -> bool:
        del what
        self.gather(param)
        return True

    def used(self, param: Parameter) -> None:
        """Reshard the parameter after its use, unless the use left a view."""
        record = param.__dict__.get(_RECORD)
        is_open = any(p is param for p in self._open)
        if record is None or not is_open or record.pins:
            return
        if storage_uses(record.full) <= self._known_uses(record):
            self._scatter(param)

    def materialize(self, param: Parameter, what: str) -> Tensor | None:
        """Return an alias of `param` without its graph, sharing its memory; filled only while `param` is used."""
        if what != "detach":
            return None
        with without_torch_function():
            alias = param.detach()
        keep(alias, _Shown(self, param))
        release(alias)
        self._record(param).shown.append(weakref.ref(alias))
        return alias

    def placeholder_for(self, param: Parameter) -> Parameter:
        """Copy a sharded parameter with its values, sharded the same way (module copies), without communication."""
        record = self._record(param)
        return self.like(param, record.name, record.chunk.clone(), record.pieces)

    def like(self, param: Parameter, name: str, chunk: Tensor, pieces: Sequence[Interval] | None) -> Parameter:
        """Build a sharded parameter like the released `param`, with values from the shard `chunk`. No communication."""
        padded = -(-param.numel() // self.group.size) * self.group.size
        full = torch.empty(padded, dtype=param.dtype, device=self._device_for(param))
        with without_torch_function():
            duplicate = Parameter(full[: param.numel()].view(param.shape), param.requires_grad)
        duplicate.__dict__[_RECORD] = _Record(full, chunk, f"a copy of {name}", next(_numbers), pieces=pieces)
        keep(duplicate, self)
        full.untyped_storage().resize_(0)
        release(duplicate)
        return duplicate

    def gather(self, param: Parameter) -> None:
        """Make `param` whole on every rank. Collective."""
        record = self._record(param)
        record.full.untyped_storage().resize_(record.full.numel() * record.full.element_size())
        with torch.no_grad():
            if record.pieces is None:
                chunk = record.chunk.to(record.full.device)
                comm.all_gather_single(record.full, chunk, self.group, unit=record.name)
            else:
                self._join(record, record.pieces)
        restore(param)
        self._open.append(param)

    def _join(self, record: _Record, pieces: Sequence[Interval]) -> None:
        """Gather for the first time a parameter that was not sharded here; afterwards its shards are equal."""
        record.full.zero_()
        parts = record.chunk.split([piece.numel for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            record.full[piece.start : piece.stop].copy_(part)
        comm.all_reduce(record.full, group=self.group, unit=record.name)
        record.chunk, record.pieces = record.chunk.new_empty(record.full.numel() // self.group.size), None
        self._store(record, None)

    def _device_for(self, param: Parameter) -> torch.device:
        """Return where `param` is whole: its device, or that of the group where a model is made on the host and the group takes none of its tensors (NCCL)."""
        place = metadata_device(self.group)
        return place if param.device.type == "cpu" and place != torch.device("cpu") else param.device

    @staticmethod
    def _record(param: Parameter) -> _Record:
        record: _Record = param.__dict__[_RECORD]
        return record

    def _close(self, param: Parameter, record: _Record) -> None:
        self._open = [p for p in self._open if p is not param]
        record.full.untyped_storage().resize_(0)

    def _scatter(self, param: Parameter) -> None:
        record = self._record(param)
        self._store(record, 0)
        self._release(param, record)

    def _store(self, record: _Record, source: int | None) -> None:
        with torch.no_grad():
            if source is not None:
                comm.broadcast(record.full, group=self.group, group_src=source, unit=record.name)
            chunk = record.chunk.numel()
            record.chunk.copy_(record.full[self.group.rank * chunk : (self.group.rank + 1) * chunk])

    @staticmethod
    def _known_uses(record: _Record) -> int:
        """Count the tensors that may lose the buffer's memory: the buffer, the parameter and its aliases."""
        record.shown = [ref for ref in record.shown if ref() is not None]
        return 2 + len(record.shown)

    @staticmethod
    def _new_buffer(param: Parameter, record: _Record, device: torch.device) -> None:
        """Allocate new memory for the unreleased `param` and its aliases."""
        record.full = torch.empty(record.full.numel(), dtype=record.full.dtype, device=device)
        param.data = record.full[: param.numel()].view(param.shape)
        with without_torch_function():
            for tensor in [tensor for ref in record.shown if (tensor := ref()) is not None]:
                tensor.data = param.data

    def _release(self, param: Parameter, record: _Record) -> None:
        self._close(param, record)
        release(param)


class Copier(Scatter):
    """Keeper of copies of a sharded model's parameters: they are whole while something computes with them, on every rank alike.

    Looking at one shows a placeholder: a copy may be looked at on one rank alone.
    """

    def materialize(self, param: Parameter, what: str) -> Tensor | None:
        """Return a placeholder without the values of `param`."""
        return placeholder_of(param, self.name_of(param))


class _Shown(AccessHandler):
    """Of what `detach` gave of a scattered parameter: it is whole while it, or the parameter, is used."""

    def __init__(self, scatter: Scatter, owner: Parameter) -> None:
        self._scatter, self._owner = scatter, owner

    def name_of(self, param: Parameter) -> str:
        record = self._owner.__dict__.get(_RECORD)
        return "whose model was sharded meanwhile" if record is None else record.name

    def on_access(self, param: Parameter, what: str) -> bool:
        if _RECORD not in self._owner.__dict__:
            raise ShardedAccessError(
                f"a tensor of shape {tuple(param.shape)} that was taken from a model inside Init was used by {what!r} after the "
                "model was sharded",
                code="sharded-access",
                fix="Take it from the sharded model, inside GatheredParameters.",
            )
        if type(self._owner) is ShardedParameter:
            self._scatter.gather(self._owner)
        restore(param)
        return True

    def used(self, param: Parameter) -> None:
        release(param)
        self._scatter.used(self._owner)


def is_scattered(param: Tensor) -> bool:
    """Whether `Init` left only a chunk of `param` on this rank."""
    return scatter_of(param) is not None


def scatter_of(param: Tensor) -> Scatter | None:
    """Return the Scatter of a sharded parameter; None for any other tensor."""
    keeper = keeper_of(param)
    return keeper if isinstance(keeper, Scatter) else None


def check_scattered(model: nn.Module) -> None:
    """Check that `Init` sharded each parameter over the ranks of its reduction group.

    Raises:
        PlanError: it made a parameter equal on other ranks ("zero-reduction-group").
    """
    for name, param in model.named_parameters():
        family, scatter = param_sharding(param).family, scatter_of(param)
        if family is not None and scatter is not None and scatter.group.ranks != family.group.ranks:
            raise PlanError(
                f"{name} is of family {family.name!r} over {family.group}, and Init made it equal on {scatter.group}",
                code="zero-reduction-group",
                fix="Build parameters that differ between ranks outside Init, or give Init the family's group.",
            )


def number_of(param: Tensor) -> int:
    """Return the number of a sharded parameter, the same on every rank: the order for collectives over several."""
    record: _Record = param.__dict__[_RECORD]
    return record.number


def chunk_of(param: Tensor) -> Tensor | None:
    """Return this rank's flat shard of a sharded parameter, zero-padded; None for any other tensor."""
    record: _Record | None = param.__dict__.get(_RECORD)
    return None if record is None else record.chunk


@contextmanager
def whole(param: Parameter) -> Iterator[Tensor]:
    """Yield the values of a parameter that a unit is about to adopt; gather and then free a sharded one. Collective."""
    keeper = keeper_of(param)
    if not isinstance(keeper, Scatter):
        yield param.data
        return
    if type(param) is ShardedParameter:
        keeper.gather(param)
    yield param.data
    keeper.give(param)


def take_over(param: Parameter) -> None:
    """Make a parameter that `Init` has sharded an ordinary one, with all of its values. Collective."""
    if is_scattered(param):
        with whole(param) as values:
            values = values.clone()
        param.data = values
