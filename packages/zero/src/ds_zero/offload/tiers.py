"""The tiers of `placement.py`: what keeps masters, optimizer state and parameters of a unit in host memory or in a file.

In host memory all is always readable, and the optimizer updates it there; what a step moves is the gradient, one way, and the new
parameters in the format that forward uses, the other way.

In a file a unit is a *record* of *regions*: the master first, then each tensor of the optimizer's state that has as many elements.
Fetched, the tensors lie in a slot of the ring (`ring.py`); stored, they have their shape and no memory, so that nobody who
forgot to fetch reads old values. State that has not the elements of its parameter (the row sums of Adafactor) stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_zero.offload.memory import host_bytes
from ds_zero.offload.part import Part
from ds_zero.offload.placement import Placement
from ds_zero.offload.scratch import Record, Ring
from ds_zero.offload.tier import Tier, tier_of

__all__ = ["FileRest", "FileTier", "HostRest", "HostTier", "made", "rest_of"]

_MASTER = ""
_CPU = torch.device("cpu")


def made(placement: Placement | str, unit: Any) -> Tier:
    """What keeps the masters and optimizer state of a unit."""
    if isinstance(placement, str):
        return tier_of(placement)(unit)
    return HostTier(placement, unit) if placement.where == "host" else FileTier(placement, unit)


class HostTier(Tier):
    """In memory of the host, where the optimizer updates it."""

    resident = False
    apart = True

    def __init__(self, placement: Placement, unit: Any) -> None:
        super().__init__(unit)
        self.placement = placement

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_bytes(numel * dtype.itemsize, device, pin=self.placement.pin).view(dtype)


class FileTier(Tier):
    """In a file, except while it is updated."""

    resident = False
    alone = True
    apart = True

    def __init__(self, placement: Placement, unit: Any) -> None:
        super().__init__(unit)
        self.placement = placement
        self.ring: Ring = unit.seat.pool.shared(("tier", placement), lambda: Ring(placement, unit.device))
        self.regions = Regions(unit.layout.shard_numel)
        expected = unit.plan.bytes.file
        self.record = Record(self.ring, expected + 8192 * (1 + unit.spec.params[0].states))
        self._held = False

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._held = True
        return self.regions.add(_MASTER, dtype).of(self.record.blank(), _MASTER)

    def begin_fetch(self) -> None:
        if not self._held and self.placement.read_ahead:
            self.record.begin()

    def fetch(self) -> None:
        if not self._held:
            self._held = True
            self._point(self.record.hold())

    def store(self) -> None:
        if self._held:
            self._take_in()
            self._point(None)
            self.record.put()
            self._held = False

    def drop(self) -> None:
        if self._held:
            self._point(None)
            self.record.drop()
            self._held = False

    def _state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Tensors that have the elements of their part: (key, where they start in the shard, the tensor)."""
        for part in self.unit.parts:
            for key, value in self.states(part).items():
                if _per_element(value, part):
                    yield key, part.start, value

    def _take_in(self) -> None:
        """State that the optimizer made or replaced since the fetch goes into the slot."""
        for key, _, value in self._state():
            self.regions.add(key, value.dtype)
        memory = self.record.grow(self.regions.nbytes)
        moved = self.regions.of(memory, _MASTER)
        if moved.data_ptr() != self.unit.shard.data_ptr():
            moved.copy_(self.unit.shard)
        for part in self.unit.parts:
            states = self.states(part)
            for key in [key for key, value in states.items() if _per_element(value, part)]:
                value, place = states[key], self.regions.of(memory, key)[part.start : part.stop]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value.detach().view(-1))
                    # Not `value.data = place`: a view of an optimizer's arena would keep that arena alive.
                    states[key] = nowhere((0,), value.dtype)
                    states[key].data = place.view(value.shape)

    def _point(self, memory: Tensor | None) -> None:
        """Every tensor to its range of `memory`; None: to none."""
        master = self.unit.shard = self.regions.of(memory, _MASTER)
        kept = [(key, start, value) for key, start, value in self._state() if key in self.regions]
        if memory is None:
            for tensor in (*(part.tensor for part in self.unit.parts), *(value for _, _, value in kept)):
                tensor.data = nowhere(tensor.shape, tensor.dtype)
            return
        for part in self.unit.parts:
            part.tensor.data = master[part.start : part.stop].view(part.tensor.shape)
        for key, start, value in kept:
            value.data = self.regions.of(memory, key)[start : start + value.numel()].view(value.shape)


class Regions:
    """Where in a record each kind of state lies; each has as many elements.

    Starts are apart by pages and by a quarter of one more: arrays that one pass reads together collide in caches otherwise.
    """

    def __init__(self, numel: int) -> None:
        self.numel, self.nbytes = numel, 0
        self._at: dict[str, tuple[int, torch.dtype]] = {}
        self._gone: dict[str, Tensor] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def add(self, key: str, dtype: torch.dtype) -> Regions:
        """Make room for one kind, if there is none."""
        if key not in self._at:
            start = -(-self.nbytes // 4096) * 4096 + len(self._at) % 4 * 1024
            self._at[key] = (start, dtype)
            self.nbytes = start + self.numel * dtype.itemsize
            self._gone[key] = nowhere((self.numel,), dtype)
        return self

    def of(self, memory: Tensor | None, key: str) -> Tensor:
        """[numel]: that kind's range of a record; without memory a tensor of the same shape that has none."""
        if memory is None:
            return self._gone[key]
        start, dtype = self._at[key]
        return memory[start : start + self.numel * dtype.itemsize].view(dtype)


def _per_element(value: Any, part: Part) -> bool:
    return isinstance(value, Tensor) and bool(value.dim()) and value.numel() == part.stop - part.start


def nowhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape that has no memory; only its shape and dtype may be read."""
    made = torch.empty((), dtype=dtype).expand(tuple(shape)).detach()
    made.untyped_storage().resize_(0)
    return made


# ---- what gathers send


def rest_of(placement: Placement | str, unit: Any) -> Any:
    """What keeps the parameters of a unit between gathers, in the format that forward uses."""
    if isinstance(placement, str):
        return Rest()
    return HostRest(placement, unit) if placement.where == "host" else FileRest(placement, unit)


class Rest:
    """On the device: nothing to do.

    Attributes:
        apart: Their memory is not the device's.
    """

    apart = False

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel]: what is written once an update, and sent by gathers."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self) -> None:
        """Return when `unit.sent` may be read and written."""

    def store(self) -> None:
        """It was written: put it away."""

    def drop(self) -> None:
        """It was only read."""


class HostRest(Rest):
    """In memory of the host."""

    apart = True

    def __init__(self, placement: Placement, unit: Any) -> None:
        self.placement, self.unit = placement, unit

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_bytes(numel * dtype.itemsize, device, pin=self.placement.pin).view(dtype)


class FileRest(Rest):
    """In a file, except while it is sent."""

    apart = True

    def __init__(self, placement: Placement, unit: Any) -> None:
        self.placement, self.unit = placement, unit
        self.ring: Ring = unit.seat.pool.shared(("rest", placement), lambda: Ring(placement, unit.device))
        self.regions = Regions(unit.layout.shard_numel).add(_MASTER, unit.dtypes.param)
        self.record = Record(self.ring, self.regions.nbytes)
        self._held = False

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._held = True
        return self.regions.of(self.record.blank(), _MASTER)

    def fetch(self) -> None:
        if self._held:
            return
        self._held = True
        self.unit.sent = self.regions.of(self.record.hold(), _MASTER)
        following = self.ring.used(self.record)
        if following is not None and self.placement.read_ahead:
            following.begin()

    def store(self) -> None:
        if self._held:
            self._held = False
            self.unit.sent = self.regions.of(None, _MASTER)
            self.record.put()

    def drop(self) -> None:
        if self._held:
            self._held = False
            self.unit.sent = self.regions.of(None, _MASTER)
            self.record.drop()
