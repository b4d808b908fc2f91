"""Where a unit's state is between uses: its master shard and the optimizer's state of it, and its parameters.

A *tier* keeps the master shard and the state. `ShardedOptimizer` updates every unit in four steps, units in canonical order:

    fetch    the shard and the optimizer's state of it are where the optimizer reads and writes them
    update   the optimizer steps the unit's parts with its summed gradients
    publish  the shard's new values go where gathers send them from, in the format forward uses
    store    the shard and the state go back to their tier

Units of the tier `device` are updated together, by one call of the optimizer; for them a step neither fetches nor stores. A unit of a tier
that is *alone* is updated by a call for it, while the next one is fetched. Forward and backward never need a tier.

The optimizer updates state in host memory there: a step moves the gradient one way and the new parameters the other way. In a file a
unit is a *record* of *regions*: the master first, then each tensor of the optimizer's state that has as many elements; other state
(the row sums of Adafactor) stays in memory. Stored tensors have their shape and no memory, so nobody reads old values.

A new tier is a subclass and a row of `TIERS`. Gradients of a unit are final when its reduction is (`Gradients.finish`), long before the
step; a norm that clips is known after the last. So what updates a unit in host memory before its step keeps what it overwrites, and
takes it back as soon as somebody fetches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ds_accel.streams import DeviceEvent
from ds_config.errors import PlanError
from ds_ops.scratch import BufferRing, RingSettings, ScratchRecord, host_bytes
from ds_zero.layout.dtypes_plan import Dtypes
from ds_zero.layout.elements import UnitLayout
from ds_zero.layout.shard_options import OffloadPolicy
from ds_zero.layout.units import UnitBytes, UnitSpec

__all__ = [
    "TIERS",
    "OffloadedUnit",
    "OptimizerSlice",
    "OptimizerStateStore",
    "ParamStore",
    "make_param_store",
    "make_state_store",
    "store_kind",
]


@dataclass(slots=True, eq=False, weakref_slot=True)
class OptimizerSlice:
    """A range of the shard that the optimizer sees as one parameter.

    Attributes:
        tensor: View of shard[start:stop], flat or in the parameter's shape.
        start, stop: In the shard.
        members: Numbers of the parameters with elements in it.
    """

    tensor: Parameter
    start: int
    stop: int
    members: tuple[int, ...]


States = Callable[[OptimizerSlice], dict[str, Any]]


class OffloadedUnit(Protocol):
    """Of a unit what a tier may use: `Unit`. The one thing that it may set is `shard`.

    Attributes:
        number: In its model.
        parts: What the optimizer sees of the shard; empty while the tier is made.
    """

    number: int
    spec: UnitSpec
    layout: UnitLayout
    dtypes: Dtypes
    params: list[Parameter]
    shard: Tensor
    parts: list[OptimizerSlice]

    @property
    def device(self) -> torch.device: ...


class ParamStore:
    """What keeps a tensor of one unit between uses. This one: on the device, nothing to do.

    Attributes:
        apart: Its memory is not the device's.
    """

    apart = False

    def __init__(self) -> None:
        self._copying: list[DeviceEvent] = []

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate [numel] uninitialized elements for a tensor while the tensor is built."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self) -> None:
        """Return when the tensor, and what belongs to it, may be read and written. Nothing if they may be already."""

    def fetch_to_send(self) -> None:
        """`fetch`, for those who only read: copies of it that are queued on the device go on."""
        self.fetch()

    def lend(self, after: DeviceEvent) -> None:
        """The device copies from the tensor until `after` has happened: its memory is written later only."""
        self._copying = [*(event for event in self._copying if not event.query()), after]

    def _settle(self) -> None:
        for event in self._copying:
            event.synchronize()
        self._copying = []

    def store(self) -> None:
        """Store the parameters after a read or a write, and free their memory."""

    def drop(self) -> None:
        """Free the parameters' memory: they were only read since the last `store`."""


class OptimizerStateStore(ParamStore):
    """The tier `device`: master and state are kept where the model is. Made once for each unit, on all ranks alike.

    Attributes:
        resident: The shard is always readable, so that a step need not fetch and store; it may be a range of the buffer that forward uses.
        alone: A unit is updated by itself.
        unit: Whose state this is.
        states: The optimizer's state of a part of the unit; empty before its first step, and where there is no optimizer.
        parks: The optimizer's state lies on the device between updates, so that others may move it meanwhile.
        parked: Brings back what was parked; None where nothing is.
    """

    resident = True
    alone = False
    parks = True

    def __init__(self, unit: OffloadedUnit) -> None:
        super().__init__()
        self.unit = unit
        self.states: States = lambda part: {}
        self.parked: Callable[[], None] | None = None

    def fetch_state(self) -> None:
        """`fetch`, for those who read the optimizer's state as well as the shard."""
        self.fetch()
        if self.parked is not None:
            self.parked()

    @staticmethod
    def planned(usage: UnitBytes) -> UnitBytes:
        """Return the bytes of a unit on the device, given the bytes that the `device` tier uses. Pure."""
        return usage

    def begin_fetch(self) -> None:
        """Start what `fetch` ends. Called while another unit is updated."""

    def gradient(self, summed: Tensor, part: Tensor) -> Tensor:
        """Convert a reduced gradient to the dtype, shape and device of the optimizer's part."""
        if summed.device != part.device:
            summed = self.landing(part).copy_(summed.view(-1))
        elif summed.dtype != part.dtype:
            summed = summed.to(part.dtype)
        return summed if summed.shape == part.shape else summed.view(part.shape)

    def landing(self, part: Tensor) -> Tensor:
        """Return a buffer [numel] of the part's dtype and device for a gradient that comes from a device.

        The buffer is reused: copies into new memory are slow.
        """
        return torch.empty(part.numel(), dtype=part.dtype, device=part.device)


TIERS: dict[str, type[OptimizerStateStore]] = {"device": OptimizerStateStore}
"""By name, as `ShardOptions.offload_optimizer` says it."""


def store_kind(tier: str | OffloadPolicy) -> type[OptimizerStateStore] | OffloadPolicy:
    """Return the object that answers planning questions about a tier: `resident`, `one_unit_at_a_time`, `planned`."""
    return state_store_type(tier) if isinstance(tier, str) else tier


def state_store_type(name: str) -> type[OptimizerStateStore]:
    """Look up the optimizer state store of a name.

    Raises:
        PlanError: no tier has this name ("zero-offload").
    """
    kind = TIERS.get(name)
    if kind is None:
        raise PlanError(
            f"there is no tier {name!r} to keep state in",
            code="zero-offload",
            fix=f"Choose from {', '.join(sorted(TIERS))}, or add a row to ds_zero.offload.state_stores.TIERS.",
        )
    return kind


_MASTER = ""


def make_state_store(placement: OffloadPolicy | str, unit: Any) -> OptimizerStateStore:
    """Build the OptimizerStateStore of a unit's master parameters and optimizer state."""
    if isinstance(placement, str):
        return state_store_type(placement)(unit)
    return HostStateStore(placement, unit) if placement.device == "host" else FileStateStore(placement, unit)


class SendBuffer(Protocol):
    """Who has what gathers send; the one thing that a place may set."""

    sent: Tensor | None


def make_param_store(placement: OffloadPolicy | str, unit: Any, sender: SendBuffer) -> ParamStore:
    """Build the ParamStore that holds `sender.sent` of a unit between all-gathers."""
    if isinstance(placement, str):
        return ParamStore()
    return HostParamStore(placement) if placement.device == "host" else FileParamStore(placement, unit, sender)


class HostParamStore(ParamStore):
    """In memory of the host."""

    apart = True

    def __init__(self, placement: OffloadPolicy, *unit: Any) -> None:
        super().__init__(*unit)
        self.placement = placement

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_bytes(numel * dtype.itemsize, device, pin=self.placement.pin).view(dtype)

    def fetch(self) -> None:
        self._settle()

    def fetch_to_send(self) -> None:
        """Nothing: it is there."""


class HostStateStore(HostParamStore, OptimizerStateStore):
    """In memory of the host, where the optimizer updates it.

    Attributes:
        wanted: Called by `fetch`, unless it is None: what was done to the state before its step is taken back, see `update/overlapped_update.py`.
    """

    resident = False
    parks = False

    def __init__(self, placement: OffloadPolicy, unit: OffloadedUnit) -> None:
        super().__init__(placement, unit)
        self.wanted: Callable[[], None] | None = None
        self._landings: dict[Tensor, Tensor] = {}

    def fetch(self) -> None:
        self.fetch_to_send()
        self._settle()

    def fetch_to_send(self) -> None:
        if self.wanted is not None:
            self.wanted()

    def landing(self, part: Tensor) -> Tensor:
        if part not in self._landings:  # one for each part: all are updated by one call
            self._landings[part] = self.memory(part.numel(), part.dtype, self.unit.device)
        return self._landings[part]


class _FileBacked(ParamStore, ABC):
    """In a file, except while it is used."""

    apart = True

    def _open(self, role: str, placement: OffloadPolicy, unit: Any, nbytes: int) -> None:
        self.placement = placement
        self.ring: BufferRing = unit.groups.pool.shared((role, placement), lambda: _ring(placement, unit.device))
        self.regions, self.record = Regions(unit.layout.shard_numel), ScratchRecord(self.ring, nbytes)
        self._on_host = False

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._on_host = True
        return self.regions.add(_MASTER, dtype).of(self.record.blank(), _MASTER)

    def fetch(self) -> None:
        self.fetch_to_send()
        self._settle()

    def fetch_to_send(self) -> None:
        if not self._on_host:
            self._on_host = True
            self._point(self.record.hold())

    def store(self) -> None:
        if self._on_host:
            self._take_in()
            self._point(None)
            self.record.put(self._let_go())

    def drop(self) -> None:
        if self._on_host:
            self._point(None)
            self.record.drop(self._let_go())

    def _let_go(self) -> Sequence[DeviceEvent]:
        """The slot is held no more. Returns after what the device has read it."""
        after, self._copying, self._on_host = self._copying, [], False
        return after

    def _take_in(self) -> None:
        """Copy tensors that were created or replaced since the fetch into the slot."""

    @abstractmethod
    def _point(self, memory: Tensor | None) -> None:
        """Point every tensor at its range of `memory`; with None, leave the tensors without memory."""


def _ring(placement: OffloadPolicy, device: torch.device) -> BufferRing:
    if placement.folder is None:
        raise ValueError("a ring belongs to files")
    settings = (placement.folder, placement.buffer_count, placement.pin, placement.write_behind, placement.io)
    return BufferRing(RingSettings(*settings), device)


class FileParamStore(_FileBacked):
    """In a file, except while it is sent."""

    def __init__(self, placement: OffloadPolicy, unit: Any, sender: SendBuffer) -> None:
        super().__init__()
        self.sender = sender
        self._open("offload_params", placement, unit, unit.layout.shard_numel * unit.dtypes.param.itemsize)

    def fetch_to_send(self) -> None:
        if self._on_host:
            return
        super().fetch_to_send()
        following = self.ring.used(self.record)
        if following is not None and self.placement.read_ahead:
            following.begin()

    def _point(self, memory: Tensor | None) -> None:
        self.sender.sent = self.regions.of(memory, _MASTER)


class _Landing:
    """Memory of the host that gradients come to, kept by the pool."""

    def __init__(self, nbytes: int, device: torch.device, pin: bool) -> None:
        self.memory = host_bytes(nbytes, device, pin=pin)

    def close(self) -> None:
        del self.memory


class FileStateStore(_FileBacked, OptimizerStateStore):
    """In a file, except while it is updated."""

    resident = False
    alone = True
    parks = False

    def __init__(self, placement: OffloadPolicy, unit: Any) -> None:
        super().__init__(unit)
        self._pool = unit.groups.pool
        self._open("offload_optimizer", placement, unit, unit.plan.bytes.file + 8192 * (1 + unit.spec.params[0].states))

    def begin_fetch(self) -> None:
        if not self._on_host and self.placement.read_ahead:
            self.record.begin()

    def landing(self, part: Tensor) -> Tensor:
        # Units are updated one after another, by each thread, and the parts of one together: one memory for those at a place in their unit.
        start = next(one.start for one in self.unit.parts if one.tensor is part)
        key, nbytes = ("landing", start, part.numel(), part.dtype, get_ident()), part.numel() * part.dtype.itemsize
        buffer: _Landing = self._pool.shared(key, lambda: _Landing(nbytes, self.unit.device, self.placement.pin))
        return buffer.memory.view(part.dtype)

    def _state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield per-element state tensors: (key, start in the shard, tensor)."""
        for part in self.unit.parts:
            for key, value in self.states(part).items():
                if _per_element(value, part):
                    yield key, part.start, value

    def _take_in(self) -> None:
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
                    states[key] = empty_placeholder((0,), value.dtype)
                    states[key].data = place.view(value.shape)

    def _point(self, memory: Tensor | None) -> None:
        master = self.unit.shard = self.regions.of(memory, _MASTER)
        entries = [(key, start, value) for key, start, value in self._state() if key in self.regions]
        if memory is None:
            for tensor in (*(part.tensor for part in self.unit.parts), *(value for _, _, value in entries)):
                tensor.data = empty_placeholder(tensor.shape, tensor.dtype)
            return
        for part in self.unit.parts:
            part.tensor.data = master[part.start : part.stop].view(part.tensor.shape)
        for key, start, value in entries:
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
        """Allocate memory for one kind, if there is none."""
        if key not in self._at:
            start = -(-self.nbytes // 4096) * 4096 + len(self._at) % 4 * 1024
            self._at[key] = (start, dtype)
            self.nbytes = start + self.numel * dtype.itemsize
            self._gone[key] = empty_placeholder((self.numel,), dtype)
        return self

    def of(self, memory: Tensor | None, key: str) -> Tensor:
        """Return the range [numel] of a record under `key`; without memory, a memoryless tensor of that shape."""
        if memory is None:
            return self._gone[key]
        start, dtype = self._at[key]
        return memory[start : start + self.numel * dtype.itemsize].view(dtype)


def _per_element(value: Any, part: OptimizerSlice) -> bool:
    return isinstance(value, Tensor) and bool(value.dim()) and value.numel() == part.stop - part.start


def empty_placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Create a tensor without memory; only its shape and dtype may be read."""
    empty = torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape)).detach()
    empty.untyped_storage().resize_(0)
    return empty
