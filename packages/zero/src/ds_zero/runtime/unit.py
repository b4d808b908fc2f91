"""One unit of communication: parameters that are gathered, reduced and updated together.

The only place that holds sharded parameters; their gradients are its `gradients`. It knows no stage, no hook and no optimizer: it
has a `Residency`, and three verbs:

    unshard        make the parameters usable: all-gather the shards into the full buffer
    reshard        give the full buffer's memory back, if the plan says so
    mark_updated   the optimizer wrote the shard: the full buffer is old

Words: *full* is the flat buffer all parameters are views of, in the format forward uses. *shard* is this rank's part of it
in master format, the only thing an optimizer sees; where the formats agree and full keeps its storage, shard is a range of
full itself, so an update needs no copy and the gather is in place. Where full is released and the formats differ, *sent* is the
shard in full's format: it is written once an update, and gathers recast nothing. Between updates the shard may be elsewhere
(`tiers.py`).

A buffer that a collective is using belongs to that collective's handle; every verb waits for it before touching the buffer.

Where the ranks share a host's memory (`memory.py`), *home* is the full buffer that all of them see, and shard is a range of home
where the formats agree: `unshard` is a barrier, `reshard` is nothing. Where they do not, home is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import Parameter
from torch.utils import swap_tensors

import ds_comm as comm
from ds_config.errors import PlanError, ShardedAccessError
from ds_zero._torch import storage_uses
from ds_zero.layout.elements import Piece, Slot
from ds_zero.layout.plan import Storage, UnitPlan
from ds_zero.offload.tiers import Part, made, rest_of
from ds_zero.policies.wire import decoded
from ds_zero.runtime.gradients import Gradients
from ds_zero.runtime.nodes import Route, Secondary
from ds_zero.runtime.released import is_scattered, release, restore, whole
from ds_zero.runtime.seat import Members, Seat

__all__ = ["Full", "Part", "Unit"]

_COMPARED = 1 << 16  # elements at a time: what is made on the way stays in the cache


class Full(Enum):
    """What the full buffer holds."""

    RELEASED = auto()  # no storage; parameters refuse to be used
    GATHERING = auto()  # storage that a collective is writing
    STALE = auto()  # storage, older than the shards
    CURRENT = auto()  # equal to the gathered shards
    AWAY = auto()  # nothing, and neither does the shard: the bytes are in host memory (suspend.py)


class Unit:
    """See the module's docstring. Made on all ranks of the seat alike; every verb that communicates is called on all of them."""

    def __init__(self, plan: UnitPlan, params: Sequence[Parameter], seat: Seat, number: int = 0) -> None:
        self.number, self.host, self.plan = number, seat.host, plan
        self.spec, self.layout, self.dtypes = plan.spec, plan.layout, plan.dtypes
        self.params, self.seat = list(params), seat
        self.rank = seat.shards.rank
        self.owned = self.layout.owned(self.rank)
        self.releases = plan.storage is Storage.RELEASED
        self.aliased = plan.aliased
        self.tier, self.rest = made(plan.tier, self), rest_of(plan.rest, self)
        self.pins = 0
        self.state = Full.CURRENT
        self._was_released = False
        self._coarse = False  # full holds what codes said
        self._gathering: list[comm.Work] = []
        keeps_near = seat.route is not None and seat.route.nodes.secondary and self.releases
        self.near = Secondary(seat.route, self.layout, plan.name) if seat.route is not None and keeps_near else None
        self.gradients = Gradients(Members(number, plan, tuple(self.params), _device(self.params[0])), seat)
        self._adopt()
        self.parts: list[Part] = []
        if self.spec.trained:
            self.parts = [self._part(*r) for r in self.gradients.ranges] if self.layout.kind == "flat" else self.split()
        self.tier.store()
        self.rest.store()

    def __repr__(self) -> str:
        return f"Unit({self.spec.name}: {len(self.params)} parameters, {self.layout.numel} elements, {self.state.name})"

    @property
    def device(self) -> torch.device:
        """Of its parameters, also while they are on meta."""
        return _device(self.params[0])

    # ---- parameters

    def _adopt(self) -> None:
        # Parameters become views of one buffer; values and identity stay.
        device, numel = _device(self.params[0]), self.layout.numel
        if self.host is None:
            taken = self._take_over()
            self.full = torch.empty(numel, dtype=self.dtypes.param, device=device) if taken is None else taken
            self.home = self.full
            for gap in self.layout.gaps if not self.releases else ():
                self.full[gap.start : gap.stop].zero_()
        else:
            self.home, self.full = self.host.full(self.number)
        with torch.no_grad():
            if self.aliased:
                self.shard = self._own(self.home)[0]
            else:
                self.shard = self.tier.memory(self.layout.shard_numel, self.dtypes.master, device)
                _clear_gaps(self.shard, self.owned)
            # What a gather sends, where neither the shard nor a range of full can be sent.
            self.sent: Tensor | None = None
            if self.plan.keeps_sent:
                self.sent = self.rest.memory(self.layout.shard_numel, self.dtypes.param, device)
                _clear_gaps(self.sent, self.owned)
            owned: dict[str, list[Piece]] = {}
            for piece in self.owned:
                owned.setdefault(piece.name, []).append(piece)
            for slot, param in zip(self.layout.slots, self.params, strict=True):
                with whole(param) as value:
                    self._fill(slot, owned.get(slot.name, ()), value)
                if param.is_meta:
                    empty = torch.empty(0, dtype=self.dtypes.param, device=device)
                    swap_tensors(param, Parameter(empty, param.requires_grad))
        self._make_views()
        self._versions = [param._version for param in self.params]
        self._uses = storage_uses(self.full)
        self._storage_bytes = self.full.untyped_storage().nbytes()
        self.reshard()  # of a unit that releases, full was never written: the model need not fit whole

    def _take_over(self) -> Tensor | None:
        """The memory of a parameter that fills the unit and is nobody else's: it becomes full as it is, nothing is copied."""
        (param, *others), slot = self.params, self.layout.slots[0]
        fits = slot.numel == self.layout.numel and param.dtype == self.dtypes.param
        if others or self.releases or not fits or param.is_meta or is_scattered(param):
            return None
        storage = param.untyped_storage()
        ours = storage_uses(param) == 1 and storage.nbytes() == param.nbytes and not param.is_inference()
        if not ours or not param.is_contiguous() or not storage.resizable() or storage.is_shared():
            return None
        return param.data.view(-1)

    def _fill(self, slot: Slot, pieces: Sequence[Piece], value: Tensor) -> None:
        """Put one parameter's values where this unit keeps them. Those of meta parameters come later: `load_pretrained`."""
        keeps_full = self.host is None and not self.releases
        if value.is_meta:
            for piece in pieces:
                for mine in ([] if self.aliased else [self.shard]) + ([] if self.sent is None else [self.sent]):
                    mine[piece.start : piece.stop].zero_()
            if keeps_full:
                self.full[slot.offset : slot.offset + slot.numel].zero_()
            return
        flat = value.reshape(-1)
        full = self.full[slot.offset : slot.offset + slot.numel]
        if keeps_full and not full.is_set_to(flat):
            full.copy_(flat)
        for piece in pieces:
            mine = flat[piece.interval.start : piece.interval.stop]
            if self.host is not None:  # every rank writes its part, once for all of them
                self.home[slot.offset + piece.interval.start : slot.offset + piece.interval.stop].copy_(mine)
            if not self.aliased:
                self.shard[piece.start : piece.stop].copy_(mine)
            if self.sent is not None:
                self.sent[piece.start : piece.stop].copy_(mine)

    def _make_views(self) -> None:
        self.views = [self.full[s.offset : s.offset + s.numel].view(s.shape) for s in self.layout.slots]
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view

    def _own(self, full: Tensor) -> list[Tensor]:
        """This rank's chunk of each segment of a buffer as long as full."""
        return [full[s.start + self.rank * s.chunk :][: s.chunk] for s in self.layout.segments]

    def unshard(self, channel: comm.Group | None = None) -> None:
        """Make every parameter usable on this rank, to the last bit. Sends (N-1)/N of full's bytes unless it is current."""
        self.start_unshard(channel=channel, exact=True)
        self.finish_unshard()

    def start_unshard(self, *, again: bool = False, channel: comm.Group | None = None, exact: bool = False) -> None:
        """The first half of `unshard`: returns while the gather runs. Parameters are unusable until `finish_unshard`.

        Args:
            again: Take part even if full is current: other ranks count on it. It is then written with what it holds.
            channel: The ranks of the seat over another channel than for foreseen gathers.
            exact: Send no codes, even if full is current by way of codes.
        """
        if exact and self._coarse:
            self.finish_unshard()
            again = True
        if self.state is Full.GATHERING or (self.state is Full.CURRENT and not again):
            return
        if self.state is Full.AWAY:
            raise ShardedAccessError(
                f"unit {self.spec.name} is needed while its parameters are away from the device",
                code="zero-suspended",
                fix="Call resume() first.",
            )
        self._was_released = self.state is Full.RELEASED
        if self._was_released:
            self.full.untyped_storage().resize_(self._storage_bytes)
        gathers = (self.layout.world > 1 or self.releases) and self.host is None
        coarse = self.plan.wire.weights is not None and not exact
        if gathers and channel is None and not exact and self.near is not None and self.near.valid:
            self._gathering += self.near.gather(self.full)
        elif gathers:
            self._gather(channel, exact=exact)
        self._coarse = coarse
        self.state = Full.GATHERING

    def _gather(self, channel: comm.Group | None, *, exact: bool) -> None:
        self.forget_near()
        route = self.seat.route if channel is None else None
        form = None if exact else self.plan.wire.weights
        start = partial(self._send, route if route is not None and route.nodes.two_steps else None, channel)
        self._fetch_sources()
        for segment, source in zip(self.layout.segments, self._sources(), strict=True):
            mine = source.to(self.full.device, non_blocking=True)
            out = self.full[segment.start : segment.start + segment.chunk * self.layout.world]
            self._gathering.append(start(out, mine) if form is None else decoded(out, mine, form, start))

    def _send(self, route: Route | None, channel: comm.Group | None, out: Tensor, mine: Tensor) -> comm.Work:
        if route is not None:
            return route.gather(out, mine, self.spec.name)
        return comm.all_gather_single(out, mine, channel or self.seat.gathers, async_op=True, unit=self.spec.name)

    def forget_near(self) -> None:
        """The shards were written: the next gather comes from them. On all ranks alike."""
        if self.near is not None:
            self.near.valid = False

    def _sources(self) -> list[Tensor]:
        """What a gather sends, one tensor a segment. Where it is not in its place in full, the collective puts it there, too."""
        base = self.sent if self.sent is not None else self.shard if self._sends_shard else None
        if base is None:
            return self._own(self.home)
        return [base[s.at : s.at + s.chunk] for s in self.layout.segments]

    def _fetch_sources(self) -> None:
        if self.sent is not None:
            self.rest.fetch()
        elif self._sends_shard:
            self.tier.fetch()

    def _drop_sources(self) -> None:
        if self.sent is not None:
            self.rest.drop()
        elif self._sends_shard and not self.spec.trained:
            self.tier.drop()

    @property
    def _sends_shard(self) -> bool:
        return self.plan.sends_shard

    def publish(self) -> None:
        """The shard's values go where gathers send them from, in full's format."""
        if self.aliased or (self.sent is None and self._sends_shard):
            return
        if self.sent is not None:
            self.rest.fetch()
        with torch.no_grad():
            for segment, there in zip(self.layout.segments, self._sources(), strict=True):
                there.copy_(self.shard[segment.at : segment.at + segment.chunk])
        self.rest.store()

    def published(self) -> None:
        """Every rank has published and all have met since: full is current."""
        self.state = Full.CURRENT

    def finish_unshard(self) -> None:
        """Wait for `start_unshard`."""
        if self.state is not Full.GATHERING:
            return
        if self.host is not None:
            self.host.barrier(f"gather of {self.spec.name}")
            self.host.forget(self.number)
        gathered = bool(self._gathering)
        for work in self._gathering:
            work.wait()
        self._gathering.clear()
        if gathered:
            self._drop_sources()
        if gathered and self.near is not None:
            self.near.keep(self.full)
        if self._was_released:
            for param in self.params:
                restore(param)
        self.state = Full.CURRENT

    def reshard(self, *, spare_aliases: bool = False) -> None:
        """Give the full buffer's memory back. Nothing happens where the residency keeps it, or while it is pinned.

        Args:
            spare_aliases: If other tensors share the memory (a state_dict taken meanwhile), leave it to them and go on with
                another buffer. Otherwise they would point to nothing; what autograd saved for backward is meant to.
        """
        if not self.releases or self.pins or self.state in (Full.RELEASED, Full.AWAY):
            return
        self.finish_unshard()
        if spare_aliases and storage_uses(self.full) > self._uses:
            self.full = self.home = torch.empty_like(self.full)  # what releases is not in memory that ranks share
            self._make_views()
        self.full.untyped_storage().resize_(0)
        for param in self.params:
            release(param)
        self.state, self._coarse = Full.RELEASED, False

    def mark_updated(self) -> None:
        """The shard was written. A graph recorded before must not be used again: autograd refuses it by version."""
        self.forget_near()
        self.publish()
        increment_version(self.params)
        self._versions = [param._version for param in self.params]
        if self.state is Full.CURRENT and not (self.aliased and self.layout.world == 1):
            self.state = Full.STALE

    def adopt_edits(self) -> None:
        """Parameters that were written since the last update go into the shard, if they are kept apart from it.

        Every rank is expected to have made the same change. A write through `param.data` leaves no trace but the values: full is
        compared with what the shard is in its format. Cost: a pass over this rank's part of full and over the shard. Where the shard is
        in another tier, which may round it, versions are compared: there only writes that torch sees count.
        """
        self._take_back()
        versions, before = [param._version for param in self.params], self._versions
        self._versions = versions
        if self.aliased or self.releases or self.host is not None or self.state is not Full.CURRENT:
            return
        if not self.tier.resident:
            self._adopt_written({i for i, (a, b) in enumerate(zip(versions, before, strict=True)) if a != b})
            return
        with torch.no_grad():
            for segment, there in zip(self.layout.segments, self._own(self.full), strict=True):
                here = self.shard[segment.at : segment.at + segment.chunk]
                for full, shard in zip(there.split(_COMPARED), here.split(_COMPARED), strict=True):
                    told = shard.to(full.dtype)
                    # A device is not asked: that would wait for it.
                    if full.device.type != "cpu" or not torch.equal(full, told):
                        shard.copy_(torch.where(full != told, full.to(shard.dtype), shard))

    def _adopt_written(self, members: set[int]) -> None:
        """What this rank has of these parameters goes from full into the shard."""
        if not members:
            return
        self.tier.fetch()
        flat, names = torch.cat(self._own(self.full)), {self.spec.params[i].name for i in members}
        with torch.no_grad():
            for piece in self.owned:
                if piece.name in names:
                    self.shard[piece.start : piece.stop].copy_(flat[piece.start : piece.stop])

    def _take_back(self) -> None:
        """`param.data = other` gave a parameter other memory: its values are a change like any, and it is a view of full again."""
        if self.state is not Full.CURRENT or self.releases:
            return
        for info, param, view in zip(self.spec.params, self.params, self.views, strict=True):
            if param.data_ptr() == view.data_ptr():
                continue
            found, own = (param.shape, param.dtype, param.device), (view.shape, view.dtype, view.device)
            if found != own:
                raise PlanError(
                    f"{info.name} was sharded as {own[1]} {tuple(own[0])} on {own[2]}; its `data` was replaced by {found[1]} "
                    f"{tuple(found[0])} on {found[2]}",
                    code="zero-replaced",
                    fix="Convert or move the model before `shard`, or write values in place.",
                )
            with torch.no_grad():
                view.copy_(param.data)
                param.data = view

    def adopt_overlay(self) -> None:
        """This rank's edits of its own chunk go into home and the shard, the others are dropped: their owners have made them.

        Call where no rank reads parameters: after every rank's backward, before the update.
        """
        if self.host is None:
            return
        if not self.aliased:
            self.tier.fetch()
        with torch.no_grad():
            for segment, home, mine in zip(
                self.layout.segments, self._own(self.home), self._own(self.full), strict=True
            ):
                if not self.aliased:
                    shard, changed = self.shard[segment.at : segment.at + segment.chunk], home != mine
                    shard[changed] = mine[changed].to(shard.dtype)
                home.copy_(mine)
        self.host.forget(self.number)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes this rank holds now, by what for. A shard that is a range of full counts as full, and so do a secondary copy and what gathers send."""
        held = {
            "full": self.full.untyped_storage().nbytes(),
            "shard": 0 if self.aliased or self.tier.apart else self.shard.untyped_storage().nbytes(),
        }
        held["full"] += 0 if self.near is None else self.near.nbytes
        held["full"] += 0 if self.sent is None or self.rest.apart else self.sent.untyped_storage().nbytes()
        return held | {"grad_full": self.gradients.full_bytes, "grad_shard": self.gradients.shard_bytes}

    def drop_idle(self) -> int:
        """Give back buffers that hold nothing. Returns the bytes that were not the pool's."""
        return self.gradients.drop_idle() + (0 if self.near is None else self.near.drop())

    # ---- what the optimizer sees

    def _part(self, start: int, stop: int) -> Part:
        members = {s.name: i for i, s in enumerate(self.layout.slots)}
        inside = tuple(members[p.name] for p in self.owned if start <= p.start < stop)
        return Part(self._parameter(self.shard[start:stop]), start, stop, inside)

    def _parameter(self, view: Tensor) -> Parameter:
        made = Parameter(view)
        if self.dtypes.state is not None:
            made.state_dtype = self.dtypes.state  # type: ignore[attr-defined]  # OpsOptimizer.state_dtype_of
        return made

    def split(self) -> list[Part]:
        """One part a parameter, in the shape of what this rank has of it: whole, rows, or flat."""
        numbers = {s.name: i for i, s in enumerate(self.layout.slots)}
        parts = []
        for piece in self.owned:
            view = self.shard[piece.start : piece.stop]
            row = max(1, prod(piece.shape[1:]))
            if piece.interval.numel == prod(piece.shape):
                view = view.view(piece.shape)
            elif self.layout.kind == "dim0":
                view = view.view(piece.interval.numel // row, *piece.shape[1:])
            parts.append(Part(self._parameter(view), piece.start, piece.stop, (numbers[piece.name],)))
        return parts


def _clear_gaps(shard: Tensor, owned: Sequence[Piece]) -> None:
    end = 0
    for piece in owned:
        shard[end : piece.start].zero_()
        end = piece.stop
    shard[end:].zero_()


def _device(param: Parameter) -> torch.device:
    return torch.get_default_device() if param.is_meta else param.device
