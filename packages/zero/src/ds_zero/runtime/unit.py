"""One unit of communication: parameters that are gathered, reduced and updated together.

It holds sharded parameters and their `gradients`. It knows no ZeRO stage, no hook and no optimizer: it has a plan, and three verbs:

    unshard        make the parameters usable: all-gather the shards into the full buffer
    reshard        give the full buffer's memory back, if the plan says so
    mark_updated   the optimizer wrote the shard: the full buffer is old

*full* is the flat buffer that all parameters are views of, in the format forward uses; `param_storage.py` says where it is between uses.
*shard* is this rank's part of it in master format, the only thing an optimizer sees: a range of full where formats agree and full keeps
its memory, else memory of its own, which may be elsewhere between updates (`state_stores.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import Parameter
from torch.utils import swap_tensors

import ds_comm as comm
from ds_accel import get_accelerator, storage_uses, streams
from ds_config.errors import ShardedAccessError
from ds_zero.layout.dtypes_plan import Dtypes
from ds_zero.layout.elements import ParamPiece, UnitLayout
from ds_zero.layout.shard_options import OffloadPolicy
from ds_zero.layout.units import UnitSpec
from ds_zero.offload.host_gradients import GradientCopies, HostGradients
from ds_zero.offload.state_stores import OptimizerSlice, make_state_store
from ds_zero.planning.unit_plan import ParamStorage, UnitPlan
from ds_zero.runtime.gradients import Gradients
from ds_zero.runtime.init_shards import whole
from ds_zero.runtime.param_storage import clear_gaps, storage_of
from ds_zero.runtime.reduce_strategies import make_reducer
from ds_zero.runtime.sharded_parameter import ShardedParameter, release, restore
from ds_zero.runtime.unit_groups import GroupSet

__all__ = ["Full", "OptimizerSlice", "Unit"]


class Full(Enum):
    """What the full buffer holds."""

    RELEASED = auto()  # no storage; parameters refuse to be used
    GATHERING = auto()  # storage that a collective is writing
    STALE = auto()  # storage, older than the shards
    CURRENT = auto()  # equal to the gathered shards
    AWAY = auto()  # nothing, and neither does the shard: the bytes are in host memory (suspend.py)


class Unit:
    """See the module's docstring. Made on all ranks of the group set alike; every verb that communicates is called on all of them.

    Attributes:
        plan, spec, layout, dtypes: What was decided, and three parts of that.
        releases: Whether full has no memory between uses.
        owned: What this rank has of each parameter.
        pins: How many contexts keep the parameters gathered.
        guarded: Whether gathered parameters are watched, see `guard`.
        parts: What the optimizer sees of the shard; empty for parameters that are not trained.
    """

    def __init__(self, plan: UnitPlan, params: Sequence[Parameter], group_set: GroupSet, number: int = 0) -> None:
        self.number = number
        self.plan = plan
        self.spec: UnitSpec = plan.spec
        self.layout: UnitLayout = plan.layout
        self.dtypes: Dtypes = plan.dtypes
        self.releases = plan.storage is ParamStorage.RELEASED
        self.groups = group_set
        self.params = list(params)
        self.owned = plan.layout.owned(group_set.shard_group.rank)
        self.pins = 0
        self.guarded = False
        self.state = Full.CURRENT
        self.parts: list[OptimizerSlice] = []
        self.state_store = make_state_store(plan.offload_optimizer, self)
        self.gradients = Gradients(plan, self.params, self.device, group_set, make_reducer(plan, group_set))
        if plan.grads_leave and streams.is_device_memory(torch.empty(0, device=self.device)):
            self.gradients.host = self._host_gradients()
        self.storage = storage_of(self)
        with torch.no_grad():
            if plan.aliased:
                self.shard = self.storage.chunks()[0]
            else:
                self.shard = self.state_store.memory(plan.layout.shard_numel, plan.dtypes.master, self.device)
                clear_gaps(self.shard, self.owned)
            self._adopt()
        self._versions = [param._version for param in self.params]
        if self.spec.trained:
            self.parts = [self._part(*r) for r in self.gradients.ranges] if self.layout.kind == "flat" else self.split()
        self.note_published()
        self.state_store.store()

    def __repr__(self) -> str:
        return f"Unit({self.spec.name}: {len(self.params)} parameters, {self.layout.numel} elements, {self.state.name})"

    @property
    def device(self) -> torch.device:
        """Of its parameters; while these are on meta torch's default device, or the accelerator's where nobody set one."""
        param = self.params[0]
        if not param.is_meta:
            return param.device
        default = torch.get_default_device()
        if default.type not in ("cpu", "meta"):
            return default
        accelerator = get_accelerator()
        return accelerator.device(accelerator.current_index())

    @property
    def full(self) -> Tensor:
        """The flat buffer, [numel]."""
        return self.storage.full

    @property
    def has_aliases(self) -> bool:
        """Whether tensors other than the unit's own share full's memory (`flat = param.data`, kept)."""
        own = 1 + len(self.storage.views) + len(self.params)
        own += 1 + len(self.parts) if self.plan.aliased else 0
        return storage_uses(self.full) > own

    def _host_gradients(self) -> HostGradients:
        device, policy = self.device, self.plan.offload_optimizer
        copies = self.groups.pool.shared(("gradient copies", device), lambda: GradientCopies(device))
        pin = not isinstance(policy, OffloadPolicy) or policy.pin
        return HostGradients(self.gradients.ranges, self.dtypes.accumulate, device, copies, pin)

    # ---- parameters

    def _adopt(self) -> None:
        # Parameters become views of one buffer; values and identity stay.
        owned: dict[str, list[ParamPiece]] = {}
        for piece in self.owned:
            owned.setdefault(piece.name, []).append(piece)
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            pieces = owned.get(slot.name, ())
            with whole(param) as value:
                # Values of meta parameters come later: `load_pretrained`.
                flat = None if value.is_meta else value.reshape(-1)
                for piece in pieces if not self.plan.aliased else ():
                    shard = self.shard[piece.start : piece.stop]
                    if flat is None:
                        shard.zero_()
                    else:
                        shard.copy_(flat[piece.interval.start : piece.interval.stop])
                self.storage.fill(slot, pieces, flat)
            if param.is_meta:
                empty = torch.empty(0, dtype=self.dtypes.param, device=self.device)
                swap_tensors(param, Parameter(empty, param.requires_grad))
        self.storage.adopt()
        if self.releases:
            self.state = Full.RELEASED

    def unshard(self, channel: comm.Group | None = None) -> None:
        """Make every parameter usable on this rank, to the last bit. Sends (N-1)/N of full's bytes unless it is current."""
        self.start_unshard(channel=channel, exact=True)
        self.finish_unshard()
        self.unguard()

    def guard(self) -> bool:
        """Make every use of the gathered parameters ask their access handler, as of released ones. Sends and frees nothing.

        Returns whether they are guarded now; not where they are released, or a context keeps them gathered.
        """
        if self.releases and self.state is Full.CURRENT and not self.pins and not self.guarded:
            for param in self.params:
                release(param)
            self.guarded = True
        return self.guarded

    def unguard(self) -> None:
        """End `guard`: the parameters may be used freely. Does nothing where they are not guarded."""
        if self.guarded:
            self.guarded = False
            for param in self.params:
                restore(param)

    def start_unshard(self, *, again: bool = False, channel: comm.Group | None = None, exact: bool = False) -> None:
        """Start `unshard` and return while the all-gather runs. Parameters are unusable until `finish_unshard`.

        Args:
            again: Take part even if the full buffer is current, since other ranks count on this rank; its values are
            written again.
            channel: A group of the same ranks, other than the group for recorded gathers.
            exact: Send no quantized values, even if the full buffer is current from quantized values.
        """
        if exact and self.storage.coarse:
            self.finish_unshard()
            again = True
        if again:
            self.finish_unneeded()  # twice in a row in the order: each of them is one that other ranks count on
        if self.state is Full.GATHERING or (self.state is Full.CURRENT and not again):
            return
        if self.state is Full.AWAY:
            raise ShardedAccessError(
                f"unit {self.spec.name} is needed while its parameters are away from the device",
                code="zero-suspended",
                fix="Call resume() first.",
            )
        self.storage.start(channel, exact=exact)
        self.state = Full.GATHERING

    def finish_unshard(self, *, arrived: bool = False) -> None:
        """Wait for `start_unshard`; not if it has `arrived`."""
        if self.state is Full.GATHERING:
            self.storage.arrived() if arrived else self.storage.finish()
            self.state = Full.CURRENT

    def finish_unneeded(self) -> None:
        """Wait for `start_unshard` of a unit that nobody here has needed yet: a use without its module is still noticed afterwards."""
        unneeded = self.state is Full.GATHERING and any(type(param) is ShardedParameter for param in self.params)
        self.finish_unshard()
        if unneeded:
            self.guard()

    def start_renew(self) -> None:
        """Mark the full buffer current, or start its all-gather. Call after all ranks published and passed a barrier."""
        if self.storage.common:
            self.state = Full.CURRENT
        else:
            self.start_unshard()

    def reshard(self, *, spare_aliases: bool = False) -> None:
        """Give the full buffer's memory back. Nothing happens where the plan keeps it, or while it is pinned.

        Args:
            spare_aliases: Leave the memory to other tensors that share it, see `ReleasedStorage.release`.
        """
        if not self.releases or self.pins or self.state in (Full.RELEASED, Full.AWAY):
            return
        self.finish_unshard()
        self.storage.release(spare_aliases=spare_aliases)
        self.state, self.guarded = Full.RELEASED, False

    def mark_updated(self, written: Tensor | None = None) -> None:
        """Mark the shard as written and refresh its copies.

        A graph recorded before must not be used again: autograd refuses the graph by version.

        Args:
            written: `storage.publish_target()`, if the update has written all new values there.
        """
        if not self.releases:
            self.finish_unshard()  # of the values before, which peers still read
        self.storage.forget()
        self.storage.publish(written)
        increment_version(self.params)
        self._versions = [param._version for param in self.params]
        self.note_published()
        if self.state is Full.CURRENT and not (self.plan.aliased and self.layout.world == 1):
            self.state = Full.STALE

    def note_published(self) -> None:
        """Note that what was written to the optimizer's parts is where forward uses it."""
        self._published = {part.tensor: part.tensor._version for part in self.parts}

    @property
    def edited(self) -> bool:
        """Whether a parameter was written since the last update, as far as its version tells."""
        return [param._version for param in self.params] != self._versions

    @property
    def unpublished(self) -> bool:
        """Whether somebody has written to the optimizer's parts since their values were published."""
        known = self._published
        return any(part.tensor._version != known.get(part.tensor, part.tensor._version) for part in self.parts)

    def adopt_edits(self) -> Tensor | None:
        """Copy parameters written since the last update into the shards, if stored separately.

        Every rank is expected to have made the same change. Returns what `storage.adopt_edits` does.
        """
        whole = self.state is Full.CURRENT and not self.releases  # what is released is whole during a use only
        replaced = self.storage.take_back() if whole else set()
        versions, before = [param._version for param in self.params], self._versions
        self._versions = versions
        if not whole:
            return None
        if versions != before:
            replaced.update(i for i, (a, b) in enumerate(zip(versions, before, strict=True)) if a != b)
        return self.storage.adopt_edits(replaced)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes this rank holds now, by what for. A shard that is a range of full counts as full, and so do a secondary copy and what gathers send."""
        shard = 0 if self.plan.aliased or self.state_store.apart else self.shard.untyped_storage().nbytes()
        grads = {"grad_full": self.gradients.full_bytes, "grad_shard": self.gradients.shard_bytes}
        return {"full": self.storage.nbytes, "shard": shard, **grads}

    def drop_idle(self) -> int:
        """Give back buffers that hold nothing. Returns the bytes that were not the pool's."""
        return self.gradients.drop_idle() + self.storage.drop_idle()

    # ---- what the optimizer sees

    def _part(self, start: int, stop: int) -> OptimizerSlice:
        numbers = self._numbers
        inside = tuple(numbers[p.name] for p in self.owned if start <= p.start < stop)
        return OptimizerSlice(self._parameter(self.shard[start:stop]), start, stop, inside)

    @property
    def _numbers(self) -> dict[str, int]:
        return {s.name: i for i, s in enumerate(self.layout.slots)}

    def _parameter(self, view: Tensor) -> Parameter:
        parameter = Parameter(view.new_empty(0))
        parameter.data = view  # with a version of its own: it counts what is written by way of the optimizer's groups
        if self.dtypes.state is not None:
            parameter.state_dtype = self.dtypes.state  # type: ignore[attr-defined]  # OpsOptimizer.state_dtype_of
        return parameter

    def split(self) -> list[OptimizerSlice]:
        """Split the shard into a part per parameter, in the shape of this rank's elements: whole, rows, or flat."""
        numbers, parts = self._numbers, []
        for piece in self.owned:
            view = self.shard[piece.start : piece.stop]
            row = max(1, prod(piece.shape[1:]))
            # A scalar stays [1]: what an optimizer has of a tensor without dims are its step counts.
            if piece.shape and piece.interval.numel == prod(piece.shape):
                view = view.view(piece.shape)
            elif self.layout.kind == "dim0":
                view = view.view(piece.interval.numel // row, *piece.shape[1:])
            parts.append(OptimizerSlice(self._parameter(view), piece.start, piece.stop, (numbers[piece.name],)))
        return parts
