"""Where a unit's parameters are between uses, one strategy for each `ParamStorage` of the plan: private, released, shared.

Words: *full* is the flat buffer that all parameters of the unit are views of, in the format forward uses. A gather fills it from what
each rank *sends*: its chunk of full, or the shard where nothing else is made of it, or *sent*, a copy of the shard in full's format
that is written once an update, so that gathers recast nothing.

    private    every rank keeps full. A gather is an all-gather into it, in place.
    released   full has no memory between uses; parameters refuse to be used. The plan's `offload_params` says where what is sent is kept.
    shared     the ranks of a host keep one copy, *home*; full is this rank's overlay of it (`ds_comm.shm.shm_units`). A gather is a barrier.

A buffer that a collective is using belongs to that collective's handle; `finish` waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_accel import storage_uses, streams
from ds_accel.streams import DeviceEvent
from ds_comm.hierarchical import HierarchicalGather
from ds_config.errors import PlanError
from ds_ops.stream import differs_from_cast
from ds_zero.layout.elements import ParamPiece, ParamSlot, UnitLayout, gaps_between
from ds_zero.layout.shard_options import CommFormat, OffloadPolicy
from ds_zero.offload.state_stores import OptimizerStateStore, ParamStore, make_param_store
from ds_zero.offload.weight_copies import WeightCopies, crosses_link
from ds_zero.planning.unit_plan import ParamStorage, UnitPlan
from ds_zero.runtime.init_shards import is_scattered
from ds_zero.runtime.sharded_parameter import AccessHandler, guard, release, restore, unguard
from ds_zero.runtime.unit_groups import GroupSet, Secondary

__all__ = ["PrivateStorage", "ReleasedStorage", "SharedStorage", "clear_gaps", "copy_edits", "parts_of", "storage_of"]

_AT_A_TIME, _AT_A_TIME_THERE = 1 << 16, 1 << 25  # elements: what is made stays in a cache; a device gets few launches


class StorageUnit(Protocol):
    """Of a unit what its storage uses: `Unit`."""

    number: int
    plan: UnitPlan
    groups: GroupSet
    params: list[Parameter]
    owned: tuple[ParamPiece, ...]
    state_store: OptimizerStateStore
    shard: Tensor

    @property
    def device(self) -> torch.device: ...


def parts_of(shard: Tensor, layout: UnitLayout) -> list[Tensor]:
    """Split a shard into the part of each segment."""
    return [shard[s.at : s.at + s.chunk] for s in layout.segments]


def clear_gaps(shard: Tensor, owned: Sequence[ParamPiece]) -> None:
    """Zeros where a shard belongs to no parameter."""
    for gap in gaps_between([(piece.start, piece.stop) for piece in owned], shard.numel()):
        shard[gap.start : gap.stop].zero_()


def copy_edits(full: Tensor, shard: Tensor) -> None:
    """Copy values of `full` into `shard` where they are not those of the shard, rounded to full's format."""
    wide = torch.promote_types(full.dtype, shard.dtype) is shard.dtype
    torch.where(full != shard.to(full.dtype), full if wide else full.to(shard.dtype), shard, out=shard)


class PrivateStorage:
    """Every rank keeps full. Also what the other strategies have in common.

    Attributes:
        full: The flat buffer, [numel]; before `adopt` its content is unspecified.
        views: Of each parameter, its range of full in its shape.
        sent: What gathers send where that is a copy of the shard; None elsewhere.
        coarse: Full holds what codes said.
        common: Once every rank has published and all have passed a barrier, full is current.
        rests: What gathers send is elsewhere than on the device between uses.
    """

    common = rests = False

    def __init__(self, unit: StorageUnit) -> None:
        self._unit, self._layout = unit, unit.plan.layout
        self._works: list[comm.Work] = []
        self.sent: Tensor | None = None
        self._arrived: DeviceEvent | None = None  # new values, which a stream of their own brings
        self.coarse = self._guarded = False
        self.full = self._allocate()

    def _allocate(self) -> Tensor:
        full = _take_over(self._unit)
        if full is None:
            full = torch.empty(self._layout.numel, dtype=self._unit.plan.dtypes.param, device=self._unit.device)
        for gap in self._layout.gaps:
            full[gap.start : gap.stop].zero_()
        return full

    def chunks(self, full: Tensor | None = None) -> list[Tensor]:
        """Return this rank's chunk of each segment, by default of the full buffer: where `publish` writes."""
        rank, base = self._unit.groups.shard_group.rank, self.full if full is None else full
        return [base[s.start + rank * s.chunk :][: s.chunk] for s in self._layout.segments]

    def fill(self, slot: ParamSlot, pieces: Sequence[ParamPiece], value: Tensor | None) -> None:
        """Put one parameter's flat values where they are kept; None stands for values that come later, zeros until then.

        Args:
            pieces: What of the parameter is this rank's.
        """
        del pieces
        there = self.full[slot.offset : slot.offset + slot.numel]
        if value is None:
            there.zero_()
        elif not there.is_set_to(value):
            there.copy_(value)

    def adopt(self) -> None:
        """Make the parameters views of the full buffer."""
        self.views = [self.full[s.offset : s.offset + s.numel].view(s.shape) for s in self._layout.slots]
        for param, view in zip(self._unit.params, self.views, strict=True):
            param.data = view

    # ---- gathers

    def start(self, channel: comm.Group | None, *, exact: bool) -> None:
        """Start to fill full. Sends (N-1)/N of its bytes.

        Args:
            channel: Ranks of the group set over another channel than for foreseen gathers.
            exact: Send no codes.
        """
        del exact
        self.await_weights()
        if self._layout.world > 1:
            self._gather(channel)

    def await_weights(self) -> None:
        """Let the current stream wait for new values that are on their way from the host."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            arrived.wait(streams.current_stream(self._unit.device))

    def _gather(self, channel: comm.Group | None, codes: CommFormat | None = None) -> None:
        group_set = self._unit.groups
        route = (
            group_set.route
            if channel is None and group_set.nodes is not None and group_set.nodes.hierarchical
            else None
        )
        start = partial(self._send, route, channel)
        for (begin, end), source in zip(self._layout.spans, self._sources(), strict=True):
            there, shard = self.full[begin:end], self._load(source)
            self._works.append(start(there, shard) if codes is None else codes.gather(there, shard, start))

    def _load(self, source: Tensor) -> Tensor:
        """Return what a gather sends, valid on the current stream; where it is copied there, its place is not written before that is done."""
        there, after = streams.copy_to_device(source, self.full.device)
        if after is not None:
            self._sender.lend(after)
        return there

    @property
    def _sender(self) -> ParamStore:
        """What keeps the tensor that gathers send, where that is none of full's memory."""
        return self._unit.state_store

    def _send(
        self, route: HierarchicalGather | None, channel: comm.Group | None, out: Tensor, shard: Tensor
    ) -> comm.Work:
        name, gathers = self._unit.plan.name, self._unit.groups.gather_group
        if route is not None:
            return route.gather(out, shard, name)
        return comm.all_gather_single(out, shard, channel or gathers, async_op=True, unit=name)

    def _sources(self) -> list[Tensor]:
        """Return the tensors that an all-gather sends, one per segment.

        Where a tensor is not in its place in the full buffer, the collective also copies the values there.
        """
        if not self._unit.plan.sends_shard:
            return self.chunks()
        if not self._unit.state_store.resident:
            self._unit.state_store.fetch_to_send()
        return parts_of(self._unit.shard, self._layout)

    def finish(self) -> bool:
        """Wait for `start`. Whether anything was sent."""
        gathered = bool(self._works)
        for work in self._works:
            work.wait()
        self.arrived()
        return gathered

    def arrived(self) -> None:
        """End a gather that is complete, for the host and for the current stream."""
        self._works.clear()
        if self._guarded:
            unguard(self._unit.params)
        self._guarded = False

    def guard(self, handler: AccessHandler) -> None:
        """Make every use of the parameters ask `handler`, until `finish`."""
        guard(self._unit.params, handler)
        self._guarded = True

    def release(self, *, spare_aliases: bool) -> None:
        """Give full's memory back, if this strategy does."""

    def load(self) -> bool:
        """Start to copy what the next gather sends from where it rests to the device. Whether there is anything to copy."""
        return False

    def forget(self) -> None:
        """Invalidate copies of the shards after a write: the next all-gather sends the shards. On all ranks alike."""

    # ---- updates and edits

    def publish_target(self) -> Tensor | None:
        """Return memory [shard_numel] in full's format, to which an update may write the shard's new values while it makes them.

        It is valid until `publish`, which is given it. None: `publish` makes the values out of the shard.
        """
        plan = self._unit.plan
        places = [] if plan.aliased or plan.sends_shard else self._places()
        if not places or not streams.is_device_memory(places[0]):
            return None
        if crosses_link(self._unit.shard, places[0]):
            return self._copies.take(self._layout.shard_numel, places[0].dtype)
        return places[0] if len(places) == 1 else None

    def publish(self, written: Tensor | None = None) -> None:
        """Copy the shard's values, cast to the full buffer's dtype, to where all-gathers read.

        Args:
            written: What `publish_target` returned, with all values.
        """
        plan = self._unit.plan
        if not plan.aliased and not plan.sends_shard:
            self._publish_to(self._places(), written)

    def _places(self) -> list[Tensor]:
        """Return where all-gathers read this rank's values, one tensor a segment."""
        return self.chunks()

    @property
    def _copies(self) -> WeightCopies:
        device, policy = self._unit.device, self._unit.plan.offload_optimizer
        pin = not isinstance(policy, OffloadPolicy) or policy.pin
        copies: WeightCopies = self._unit.groups.pool.shared(
            ("weight copies", device), lambda: WeightCopies(device, pin)
        )
        return copies

    @torch.no_grad()
    def _publish_to(self, places: Sequence[Tensor], written: Tensor | None) -> None:
        shard = self._unit.shard
        self.await_weights()
        if places and not self._unit.state_store.resident and crosses_link(shard, places[0]):
            if written is None:  # cast here: half the bytes on the link
                written = self._copies.take(shard.numel(), places[0].dtype).copy_(shard)
            self._arrived = self._copies.send(written, places)
        elif written is None:
            for there, part in zip(places, parts_of(shard, self._layout), strict=True):
                for out, some in zip(there.split(_AT_A_TIME_THERE), part.split(_AT_A_TIME_THERE), strict=True):
                    out.copy_(some)

    def take_back(self, *, moved: bool = False) -> set[int]:
        """Copy parameters whose memory `param.data = other` replaced into the full buffer, and restore the views; return their numbers.

        Args:
            moved: From other devices, too: `model.cpu()` while the parameters are whole.

        Raises:
            PlanError: the new memory has another shape or dtype, or is on another device ("zero-replaced").
        """
        replaced: set[int] = set()
        params = self._unit.params
        if [param.data_ptr() for param in params] == [view.data_ptr() for view in self.views]:
            return replaced
        for i, (param, view) in enumerate(zip(params, self.views, strict=True)):
            if param.data_ptr() == view.data_ptr():
                continue
            current, expected = (param.shape, param.dtype, param.device), (view.shape, view.dtype, view.device)
            if current[:2] != expected[:2] or (current[2] != expected[2] and not moved):
                info = self._unit.plan.spec.params[i]
                raise PlanError(
                    f"{info.name} was sharded as {expected[1]} {tuple(expected[0])} on {expected[2]}; its `data` was replaced by {current[1]} "
                    f"{tuple(current[0])} on {current[2]}",
                    code="zero-replaced",
                    fix="Convert or move the model before `shard`, or write values in place.",
                )
            with torch.no_grad():
                values = param.data.to(view.device)
                if param.device == view.device or not torch.equal(values, view):
                    replaced.add(i)
                    view.copy_(values)
                param.data = view
        return replaced

    @torch.no_grad()
    def adopt_edits(self, written: Collection[int]) -> Tensor | None:
        """Copy edits of the full buffer that every rank made alike into the shard, if stored separately.

        A write through `param.data` leaves no trace but the values: the full buffer is compared with the shard in its
        dtype, one pass over
        both. Where the shard is offloaded, which may round it, only parameters whose version changed count: `written`
        are their numbers.

        Returns:
            On a device, which is not waited for here: whether there are edits, bool of one element, valid on the current stream. Who has
            read it calls `copy_edits`. Cost: 6 bytes an element with a 16-bit buffer beside an fp32 shard, 12 where no kernel is compiled
            (`ds_ops.stream.differs_from_cast`).
        """
        if self._unit.plan.aliased:
            return None
        if not self._unit.state_store.resident:
            names = {self._unit.plan.spec.params[i].name for i in written}
            flat = torch.cat(self.chunks()) if names else None
            for piece in [piece for piece in self._unit.owned if piece.name in names]:
                self._unit.state_store.fetch()
                self._unit.shard[piece.start : piece.stop].copy_(flat[piece.start : piece.stop])  # type: ignore[index]
            return None
        if streams.is_device_memory(self.full):
            return torch.stack([differs_from_cast(full, shard) for full, shard in self._compared()]).any()
        for full, shard in self._compared():
            if not torch.equal(full, shard.to(full.dtype)):
                copy_edits(full, shard)
        return None

    @torch.no_grad()
    def copy_edits(self) -> None:
        """Copy edits of the full buffer into the shard where both differ. Valid on the current stream."""
        for full, shard in self._compared():
            copy_edits(full, shard)

    def _compared(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (range of full, the same of the shard), a part at a time."""
        for there, here in zip(self.chunks(), parts_of(self._unit.shard, self._layout), strict=True):
            at_a_time = _AT_A_TIME_THERE if streams.is_device_memory(there) else _AT_A_TIME
            yield from zip(there.split(at_a_time), here.split(at_a_time), strict=True)

    def adopt_overlay(self) -> None:
        """Publish this rank's private edits to its peers. Does nothing where the full buffer is not shared."""

    # ---- memory

    @property
    def resident_tensors(self) -> list[Tensor]:
        """What on the device has to have its bytes between uses."""
        return [self.full]

    @property
    def nbytes(self) -> int:
        """Bytes held now on the device; a secondary copy and what gathers send count."""
        return self.full.untyped_storage().nbytes()

    def drop_idle(self) -> int:
        """Give back copies that a gather can do without. Returns their bytes."""
        return 0


class ReleasedStorage(PrivateStorage):
    """Full has memory while it is used only. It is never written at start: the model need not fit whole.

    Attributes:
        param_store: Keeps `sent`.
    """

    def __init__(self, unit: StorageUnit) -> None:
        super().__init__(unit)
        plan, nodes, route = unit.plan, unit.groups.nodes, unit.groups.route
        self.param_store = make_param_store(plan.offload_params, unit, self)
        if plan.keeps_sent:
            self.sent = self.param_store.memory(plan.layout.shard_numel, plan.dtypes.param, unit.device)
            clear_gaps(self.sent, unit.owned)
        self.rests = self.param_store.apart and self.sent is not None
        self._codes = plan.wire if plan.wire.codes_gathers else None
        self._loaded: Tensor | None = None
        self._on_device = streams.is_device_memory(self.full)
        near = nodes is not None and nodes.secondary_partition
        self._near = Secondary(route, plan.layout, plan.name) if route is not None and near else None

    def _allocate(self) -> Tensor:
        return torch.empty(self._layout.numel, dtype=self._unit.plan.dtypes.param, device=self._unit.device)

    def fill(self, slot: ParamSlot, pieces: Sequence[ParamPiece], value: Tensor | None) -> None:
        del slot
        for piece in pieces if self.sent is not None else ():
            there = self.sent[piece.start : piece.stop]  # type: ignore[index]
            there.zero_() if value is None else there.copy_(value[piece.interval.start : piece.interval.stop])

    def adopt(self) -> None:
        super().adopt()
        self._uses, self._nbytes = storage_uses(self.full), self.full.untyped_storage().nbytes()
        self._is_out = False
        self.release(spare_aliases=False)
        if self.rests:
            self.param_store.store()

    def start(self, channel: comm.Group | None, *, exact: bool) -> None:
        self.await_weights()
        if self._is_out:
            self.full.untyped_storage().resize_(self._nbytes)
        codes = None if exact else self._codes
        self.coarse = codes is not None
        if channel is None and not exact and self._near is not None and self._near.valid:
            self._works += self._near.gather(self.full)
            return
        self.forget()
        self._gather(channel, codes)

    def load(self) -> bool:
        on_node = self._near is not None and self._near.valid
        if not self.rests or self.sent is None or not self._is_out or self._works or on_node:
            return False
        if self._loaded is None:
            self.param_store.fetch_to_send()
            self._loaded = self._load(self.sent)
        return True

    @property
    def _sender(self) -> ParamStore:
        return self._unit.state_store if self.sent is None else self.param_store

    def _sources(self) -> list[Tensor]:
        if self.sent is None:
            return super()._sources()
        if self._loaded is None and self.rests:
            self.param_store.fetch_to_send()
        return parts_of(self.sent if self._loaded is None else self._loaded, self._layout)

    def finish(self) -> bool:
        gathered = super().finish()
        self._loaded = None
        if gathered and self.rests:
            self.param_store.drop()
        elif gathered and self.sent is None and not self._unit.state_store.resident:
            self._unit.state_store.drop()
        if gathered and self._near is not None:
            self._near.keep(self.full)
        for param in self._unit.params if self._is_out else ():
            restore(param)
        self._is_out = False
        return gathered

    def release(self, *, spare_aliases: bool) -> None:
        """Give full's memory back.

        Args:
            spare_aliases: If other tensors share the memory (a state_dict taken meanwhile), leave it to them and go on with
                another buffer. Otherwise they would point to nothing; what autograd saved for backward is meant to.
        """
        if spare_aliases and storage_uses(self.full) > self._uses:
            self.full = torch.empty_like(self.full)
            super().adopt()
        self.full.untyped_storage().resize_(0)
        for param in self._unit.params:
            release(param)
        self._is_out, self.coarse = True, False

    def forget(self) -> None:
        if self._near is not None:
            self._near.valid = False

    def publish_target(self) -> Tensor | None:
        if self.sent is None or not self._on_device:
            return None
        if self.rests:
            self.param_store.fetch()
        crosses = crosses_link(self._unit.shard, self.sent)
        return self._copies.take(self.sent.numel(), self.sent.dtype) if crosses else self.sent

    def publish(self, written: Tensor | None = None) -> None:
        self._loaded = None
        if self.rests:
            self.param_store.fetch()
        if self.sent is not None:
            self._publish_to(parts_of(self.sent, self._layout), written)
        if self.rests:
            self.param_store.store()

    @property
    def resident_tensors(self) -> list[Tensor]:
        if self.sent is not None:
            return [] if self.param_store.apart else [self.sent]
        return [] if self._unit.state_store.apart else [self._unit.shard]

    @property
    def nbytes(self) -> int:
        total = 0 if self._near is None else self._near.nbytes
        total += 0 if self.sent is None or self.param_store.apart else self.sent.untyped_storage().nbytes()
        return total + super().nbytes

    def drop_idle(self) -> int:
        return 0 if self._near is None else self._near.drop()


class SharedStorage(PrivateStorage):
    """The ranks of a host keep one copy of the parameters; see `ds_comm.shm.shm_units`.

    Attributes:
        home: The copy.
    """

    common = True

    def __init__(self, unit: StorageUnit) -> None:
        if unit.groups.host is None:
            raise RuntimeError(f"unit {unit.plan.name} is planned in shared memory, and there is none")
        self._host = unit.groups.host
        super().__init__(unit)

    def _allocate(self) -> Tensor:
        self.home, full = self._host.full(self._unit.number)
        return full

    def chunks(self, full: Tensor | None = None) -> list[Tensor]:
        return super().chunks(self.home if full is None else full)

    def fill(self, slot: ParamSlot, pieces: Sequence[ParamPiece], value: Tensor | None) -> None:
        for piece in pieces if value is not None else ():  # every rank writes its part, once for all of them
            start, stop = piece.interval.start, piece.interval.stop
            self.home[slot.offset + start : slot.offset + stop].copy_(value[start:stop])  # type: ignore[index]

    def start(self, channel: comm.Group | None, *, exact: bool) -> None:
        """Do nothing: `finish` waits for the shared memory."""

    def finish(self) -> bool:
        self._host.barrier(f"gather of {self._unit.plan.name}")
        self._host.forget(self._unit.number)
        return False

    def publish_target(self) -> Tensor | None:
        """Return None: peers read the shared memory while an update runs."""
        return None

    def adopt_edits(self, written: Collection[int]) -> None:
        """Return None and do nothing: `adopt_overlay` handles edits of shared memory."""

    def adopt_overlay(self) -> None:
        """Copy this rank's edits of its chunk into shared memory and the shard; drop edits of other chunks.

        The owners of other chunks have made the same edits. Call where no rank reads parameters: after every rank's
        backward, before the
        update.
        """
        apart = not self._unit.plan.aliased
        if apart:
            self._unit.state_store.fetch()
        shards = parts_of(self._unit.shard, self._layout)
        with torch.no_grad():
            for shard, home, edited in zip(shards, self.chunks(), self.chunks(self.full), strict=True):
                if apart:
                    changed = home != edited
                    shard[changed] = edited[changed].to(shard.dtype)
                home.copy_(edited)
        self._host.forget(self._unit.number)


_KINDS: Mapping[ParamStorage, type[PrivateStorage]] = {
    ParamStorage.PRIVATE: PrivateStorage,
    ParamStorage.RELEASED: ReleasedStorage,
    ParamStorage.SHARED: SharedStorage,
}


def storage_of(unit: StorageUnit) -> PrivateStorage:
    """Build the ParamStorage that the plan chose."""
    return _KINDS[unit.plan.storage](unit)


def _take_over(unit: StorageUnit) -> Tensor | None:
    """Reuse the memory of an unshared parameter that fills the unit as the full buffer, without a copy; else None."""
    (param, *others), slot = unit.params, unit.plan.layout.slots[0]
    fits = slot.numel == unit.plan.layout.numel and param.dtype == unit.plan.dtypes.param
    if others or not fits or param.is_meta or is_scattered(param):
        return None
    storage = param.untyped_storage()
    ours = storage_uses(param) == 1 and storage.nbytes() == param.nbytes and not param.is_inference()
    if not ours or not param.is_contiguous() or not storage.resizable() or storage.is_shared():
        return None
    # A view would keep its base, which `Unit.has_aliases` would take for somebody else's.
    return torch.empty(0, dtype=param.dtype, device=param.device).set_(storage, 0, (param.numel(),), (1,))
