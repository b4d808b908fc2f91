"""A model cut into units, and what drives them: made once, owns everything it made, gives all of it back.

`ShardedModel` is what `shard` builds and what the optimizer, checkpoint and access functions work with; a model without an optimizer (a
frozen reference, inference) needs nothing more. `Runtime` are its hooks. Order between ranks is that of `gather_order.py`: nothing here depends
on which rank is faster or on which path it takes.

Note "two orders". Gathers and reductions travel on channels of their own, each in its own order, because a rank cannot reduce before it
has gathered and computed. Waiting for a reduction inside a backward could therefore wait for a rank that waits for our next gather. So
such a wait helps: while it lasts, the next gathers in order are started. Gathers that no sequence foresees have a third channel.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_accel import host_memory
from ds_comm import Group, LocalShard, all_gather_json
from ds_comm.broadcast_state import make_same
from ds_comm.buffer_pool import BufferPool
from ds_comm.metadata import raise_together
from ds_comm.placement import Interval
from ds_comm.reduction_group import ReductionGroup, logical_of
from ds_config.errors import PlanError, ShardedAccessError, UnsupportedError
from ds_config.sizes import bytes_text
from ds_zero._torch import accumulates
from ds_zero.layout.dtypes_plan import Precision
from ds_zero.layout.elements import ParamPiece
from ds_zero.layout.model_checks import check_model, is_scripted
from ds_zero.layout.model_members import named_members
from ds_zero.layout.reduction_groups import check_same, family_name, find_reduction_groups
from ds_zero.layout.shard_options import OptimizerTraits, ShardOptions, describe, dtype_name
from ds_zero.layout.units import DENSE, plan_units
from ds_zero.planning.unit_plan import ZeroPlan, plan_all
from ds_zero.runtime.forward_backward import Backward
from ds_zero.runtime.gather_order import merge_orders
from ds_zero.runtime.gathering import Gathering
from ds_zero.runtime.init_shards import check_scattered, is_scattered, whole
from ds_zero.runtime.reduce_runtime import GradientReductions
from ds_zero.runtime.reduce_strategies import tables
from ds_zero.runtime.suspend import KINDS, Away, bring_back, take_away
from ds_zero.runtime.unit import OptimizerSlice, Unit
from ds_zero.runtime.unit_groups import GroupTable
from ds_zero.runtime.weight_arrivals import WeightArrivals

__all__ = ["Runtime", "ShardOptions", "ShardedModel", "end_sharding", "group_for", "sharding_of"]


class Runtime(Backward):
    """The hooks of one model.

    Args:
        model: Its root module.
        units: In canonical order, the same on every rank.
        ahead_numel: Elements gathered before they are needed.
        inflight_bytes: Gradient bytes that may be in unfinished reductions; below 0 each is finished where it starts.
    Attributes:
        gathering, reducing: The two sides.
        begun: Called when a backward begins; what it raises ends that backward.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], ahead_numel: int, inflight_bytes: int) -> None:
        super().__init__()
        self.begun: Callable[[], None] = lambda: None
        self.arrivals: WeightArrivals | None = None
        self._keys = _keys(units)
        self._model, self._settled = model, False
        self.gathering = Gathering(units, self, ahead_numel)
        self.reducing = GradientReductions(units, self, self.gathering, inflight_bytes)
        self.reducing.attach()
        self.gathering.attach(model)

    def detach(self) -> None:
        """Remove every hook. Units must not be released."""
        self.reducing.detach()
        self.gathering.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the hooks from the model's modules, while inside. Parameters must stay gathered meanwhile."""
        self.gathering.remove_hooks()
        try:
            yield
        finally:
            self.gathering.attach(self._model)

    # ---- phases of a backward

    def begin_backward(self) -> None:
        if self.arrivals is not None:
            self.arrivals.finish()
        units, trained = self.reducing.units, self.reducing.trained
        self.reducing.adds = accumulates(param for number in reversed(trained) for param in units[number].params)
        self.begun()
        self.reducing.begin_backward()
        self.gathering.begin_backward()

    def end_backward(self, *, raised: bool) -> None:
        """Reduce every trained unit and reshard every released unit."""
        self.gathering.finish_backward()
        try:
            self.reducing.finish_backward(raised=raised)
        finally:
            self.gathering.clear_backward()
            self.gathering.release_all()

    def end_inner(self, units: set[int]) -> None:
        self.gathering.end_inner(units)

    # ---- between steps

    def settle(self, group: Group) -> None:
        """Follow the order recorded in the first step, if all ranks recorded the same or a part of the same. Once. Collective."""
        if self._settled:
            return
        self._settled = True
        # What is at a place among the units of its family is the same on all of the family's ranks; numbers need not be.
        orders = {"reduces": self.reducing.observed_order, **self.gathering.orders.observed}
        summary = {
            "seen": orders,
            "keys": self._keys,
            "shared": [self._keys[n] for n in self.gathering.shared],
            "idle": [self._keys[n] for n in self.gathering.idle],
        }
        everyone: list[dict[str, Any]] = all_gather_json(summary, group, unit="settle")
        if all(one["keys"] == everyone[0]["keys"] for one in everyone):
            merged = {name: merge_orders([one["seen"][name] for one in everyone]) for name in orders}
            if all(one["seen"]["reduces"] == orders["reduces"] for one in everyone):
                self.reducing.adopt(orders["reduces"])
            self.gathering.adopt(merged)
        shared = {(family, place) for one in everyone for family, place in one["shared"]}
        idle = set.intersection(*({(family, place) for family, place in one["idle"]} for one in everyone))
        self.gathering.share(*({n for n, key in enumerate(self._keys) if key in keys} for keys in (shared, idle)))

    def stepped(self, *, keep_gradients: bool) -> None:
        """Reset gathering after an update, or a skipped update; and what gradients there are, unless they stay."""
        self.gathering.stepped()
        if not keep_gradients:
            self.reducing.stepped()


def _keys(units: Sequence[Unit]) -> list[tuple[str, int]]:
    """Return (reduction group, index within that group) of each unit."""
    counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [(unit.spec.family, next(counters[unit.spec.family])) for unit in units]


def _check_everyone(everyone: Group, families: Mapping[str, ReductionGroup], options: ShardOptions) -> None:
    wants = options.clip is not None or options.precision is not None
    beyond = sorted({rank for f in families.values() for rank in f.group.ranks} - set(everyone.ranks))
    if beyond and (wants or options.norm is not None):
        raise PlanError(
            f"gradients are summed with ranks {beyond}, and the norm goes over {everyone} only",
            code="zero-norm",
            fix="Pass norm= a group of all ranks that hold a part of the model.",
        )


def _check_host(plan: ZeroPlan, options: ShardOptions, everyone: Group) -> None:
    """Check on every rank that each host can hold what its ranks offload. Collective if offload was asked for, also on a rank that trains nothing.

    Raises:
        PlanError: on every rank, if a host cannot ("offload-host-memory").
    """
    if options.offload_optimizer == options.offload_params == "device":
        return
    refusals: list[str] = [""] * everyone.size
    refusal = room_refusal(plan.host, int(os.environ.get("LOCAL_WORLD_SIZE") or 1), what=str(plan))
    comm.all_gather_object(refusals, refusal, everyone, unit="plan")
    if any(refusals):
        raise PlanError(
            next(filter(None, refusals)),
            code="offload-host-memory",
            fix="Offload to files (device: nvme), offload a smaller ratio, or use more hosts.",
        )


def room_refusal(needed: int, ranks: int, *, what: str) -> str:
    """Explain why the host cannot hold `needed` bytes of offload for each of its `ranks`; empty if enough is free."""
    available = host_memory().available
    if needed * ranks <= available:
        return ""
    return (
        f"{ranks} ranks of this host would keep {bytes_text(needed)} each in its memory, together {bytes_text(needed * ranks)}, "
        f"of which {bytes_text(available)} are free:\n{what}"
    )


def group_for(options: ShardOptions) -> Group:
    """Return the ranks to shard and average over: those of the options, else all, whose group is made if a launcher started several."""
    return comm.ensure_world() if options.group is None else comm.as_group(options.group)


class ShardedModel:
    """The units of one model and the hooks that drive them.

    Args:
        model: Equal on every rank in shape; values are made equal to rank 0's. What is assigned to a family (`ds_comm.reduction_group`) is
            equal on the family's ranks only.
        groups: id of a parameter -> number of its optimizer group. Parameters not in it are not trained.
        options: How.
        habits: What the optimizer needs and keeps, by number of its group; by default the layout of the options for all.
    Attributes:
        plan: What was decided, unit by unit, before anything was allocated.
        closed: Whether the model was given back.
        end: Closes this, and the optimizer that it is a part of.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[int, int],
        options: ShardOptions,
        habits: Mapping[int, OptimizerTraits] | None = None,
    ) -> None:
        end_sharding(model)
        self.model, self.options, self.closed = model, options, False
        self.group = group_for(options)
        self.precision = Precision.of(options.precision)
        residency = options.residency
        check_model(model, self.precision, self.group.size, released=residency.shard_params)
        if options.sparse and residency.shard_optim:
            raise PlanError(
                f"sparse gradients were asked for with {residency}: shards of a gradient are summed, not rows",
                code="zero-sparse",
                fix="Use stage 0, or leave it out.",
            )
        options.quantized_comm.check(residency)
        self.families = find_reduction_groups(model, self.group)
        check_scattered(model)
        self.everyone = self.group if options.norm is None else comm.as_group(options.norm)
        _check_everyone(self.everyone, self.families, options)
        params, modules = describe(model, groups, habits or OptimizerTraits(options.layout or "flat"), self.precision)
        specs = plan_units(params, modules, residency, options.policy)
        by_name = named_members(model)
        self.logical = {name: logical_of(name, param) for name, param in by_name.items()}
        check_same(specs, self.logical, self.families)
        self.unloaded = {name for name, param in by_name.items() if param.is_meta}
        ready = [p for p in by_name.values() if not p.is_meta and not is_scattered(p)]
        for name, family in self.families.items():
            make_same([t for t in (*ready, *model.buffers()) if family_name(t) == name], family.group)
        self.pool = BufferPool()
        self.away: list[Away] = []
        on_host = all(p.device.type == "cpu" for p in by_name.values())
        rows = tables(model) if options.sparse else frozenset()
        self.seating = GroupTable(self.families, self.pool, options, host=on_host, tables=rows)
        self.plan = ZeroPlan(self.group.size, residency, plan_all(specs, options, self.seating.ranks))
        _check_host(self.plan, options, self.everyone)
        self.seating.share(self.plan.units)
        self.units = self._make_units(by_name)
        for host in self.seating.hosts:
            host.barrier("shard")
        self.runtime = Runtime(model, self.units, *self._run_ahead())
        self.arrivals = WeightArrivals(model, self.units, overlap=options.overlap and not is_scripted(model))
        self.runtime.arrivals = self.arrivals
        self._where = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.grad_factor: Callable[[Unit], float] = lambda unit: 1.0 / unit.groups.reduction_group.divisor
        self.state_of: Callable[[OptimizerSlice], Mapping[str, Any]] = lambda part: {}
        self.end: Callable[[], None] = self.close
        for param in by_name.values():
            setattr(param, _TICKET, _Ticket(self))

    def _make_units(self, by_name: Mapping[str, Parameter]) -> list[Unit]:
        """Build the units of the plan; raise on all ranks where one of them cannot (a folder, memory). Collective."""
        units: list[Unit] = []
        error: Exception | None = None
        try:
            for number, unit in enumerate(self.plan.units):
                params = [by_name[p.name] for p in unit.spec.params]
                units.append(Unit(unit, params, self.seating.group_sets[unit.spec.family], number))
        except Exception as failure:
            error = failure
            for param in by_name.values():  # the others gather on, one by one, what `Init` left in chunks
                if is_scattered(param):
                    with whole(param):
                        pass
        # Before any barrier of them: who waits there would wait for a rank that has left.
        raise_together(error, self.everyone, unit="units")
        return units

    def _run_ahead(self) -> tuple[int, int]:
        """Return the limits of prefetched elements and of gradient bytes in unfinished reductions."""
        if not self.options.overlap:
            return 0, -1
        residency = self.plan.residency
        arena = max((u.layout.numel * u.dtypes.accumulate.itemsize for u in self.units), default=0)
        # One is summed while the next is filled; one more where gathers travel beside it and make it slower. At stage 0 the
        # buffers are the gradients, so all may be under way.
        several = (2 if residency.shard_params else 1) if residency.shard_optim else len(self.units)
        return max((u.layout.numel for u in self.units), default=0), several * arena

    def keep_gradients_local(self) -> None:
        """Stop averaging gradients over ranks, for an optimizer that averages them. Stage 0 only.

        Their norm, alike on all ranks, is the root of the mean of the ranks' squared norms, which bounds the norm of
        their mean.

        Raises:
            UnsupportedError: some parameters are not on all ranks ("zero-family-local").
        """
        if len(self.families) > 1:
            raise UnsupportedError(
                f"the optimizer averages gradients itself, over {self.group}; the model has parameters of families "
                f"{', '.join(sorted(set(self.families) - {DENSE}))}, which are averaged over other ranks",
                code="zero-family-local",
                fix="Use another optimizer for this model.",
            )
        alone = comm.self_group("alone", self.group.global_rank)
        self.families = {DENSE: replace(self.families[DENSE], divisor=1, copies=self.group.size)}
        for unit in self.units:
            unit.groups = replace(unit.groups, reduction_group=self.families[DENSE], replicate_group=alone)
            unit.gradients.groups = unit.groups

    def find(self, param: Tensor) -> tuple[Unit, int] | None:
        """Return the unit of a parameter and its index in the unit; None for a parameter of another model."""
        return self._where.get(id(param))

    def refresh(self) -> None:
        """Refresh every copy of the shards after a write from outside. Collective: an all-gather of all unsharded units."""
        self.unloaded.clear()
        self.arrivals.finish()
        for unit in self.units:
            unit.state_store.fetch()
            unit.mark_updated()
            unit.state_store.store()
        for host in self.seating.hosts:
            for number in host.edited():  # what was written is newer, and the next update would adopt the edits
                host.forget(number)
        self.gather_kept()
        self.arrivals.finish()  # whoever loads may change the files next: no rank leaves before the others have come

    def put_away(self) -> None:
        """Store the shards fetched for full access back to their offload target; views become invalid."""
        for unit in self.units:
            unit.state_store.store()

    def gather_kept(self) -> None:
        """Bring the full buffers that keep their storage up to date, see `weight_arrivals.py`."""
        for host in self.seating.hosts:
            host.barrier("update")
        self.arrivals.start()

    def adopt_edits(self) -> None:
        """Copy parameters that every rank edited alike since the last update into the shards.

        Call before an update, on all ranks. Waits once for each device.
        """
        asked: dict[torch.device, list[tuple[Unit, Tensor]]] = {}
        for unit in self.units:
            edited = unit.adopt_edits()
            if edited is not None:
                asked.setdefault(edited.device, []).append((unit, edited))
        for flags in asked.values():
            answers = torch.stack([edited for _, edited in flags]).tolist()
            for unit in (unit for (unit, _), answer in zip(flags, answers, strict=True) if answer):
                unit.storage.copy_edits()
        for host in self.seating.hosts:
            for number in host.edited():
                self.units[number].storage.adopt_overlay()

    def quiet(self, what: str, units: Iterable[Unit] | None = None) -> None:
        """Return when no rank is still in a forward or backward of this model, where others could see a write to `units` (all
        of them). Collective over their ranks."""
        hosts = {unit.groups.host for unit in (self.units if units is None else units)}
        for host in self.seating.hosts:
            if host in hosts:
                host.barrier(what)

    def suspend(
        self, kinds: Collection[str] = KINDS, *, pin_memory: bool = True, state: Iterable[Tensor] = ()
    ) -> dict[str, int]:
        """Move state to host memory between steps, for another program to use the device. `resume` brings it back.

        Args:
            kinds: Of `optimizer`, `masters`, `parameters`, `gradients`.
            pin_memory: Into page-locked memory.
            state: Tensors of the optimizer's state.
        Returns:
            Bytes given back by kind, and `buffers`: idle ones, which hold nothing. Memory that ranks share stays.
        """
        self.runtime.reducing.drain()
        self.arrivals.finish()
        spare = 0
        for unit in self.units:
            unit.reshard()
            spare += unit.drop_idle()
        spare += self.pool.drop()
        gone = take_away(self.units, state, kinds, pin_memory=pin_memory)
        self.away += gone
        return {k: sum(a.host.numel() for a in gone if a.kind == k) for k in kinds} | {"buffers": spare}

    def resume(self) -> None:
        """Bring back what `suspend` moved, to the same bits."""
        bring_back(self.units, self.away)
        self.away.clear()

    def check_here(self) -> None:
        """Raise if a step cannot be made, because state is away or has no values yet. Waits for the weights of the step before."""
        self.check_open("step")
        self.arrivals.finish()
        if self.away:
            raise ShardedAccessError(
                f"step while state is away from the device: {', '.join(sorted({a.kind for a in self.away}))}",
                code="zero-suspended",
                fix="Call resume() first.",
            )
        if self.unloaded:
            raise PlanError(
                f"step on a model built on meta of which {len(self.unloaded)} parameters have no values yet",
                code="zero-not-loaded",
                fix="Call ds_zero.load_pretrained(model, path), or set the shards and call `refresh`.",
            )

    def check_open(self, what: str) -> None:
        """Raise if the model was given back: what is left would train and save nothing."""
        if self.closed:
            raise PlanError(
                f"{what} after the model was given back: by close(), or because it, or one that shares its parameters, was sharded anew",
                code="zero-closed",
                fix="Use the newer optimizer or engine, or shard the model again. Of several optimizers for one model, make groups of one.",
            )

    def param_shards(self) -> list[LocalShard]:
        """Return this rank's elements of every parameter, in master dtype, as views: `param/<name>`.

        Offloaded shards are fetched, and stay until the next update or `refresh`.
        """
        shards = []
        self.check_open("shards()")
        self.arrivals.finish()  # who writes a shard, a load, must not write what peers still gather
        for unit in self.units:
            unit.state_store.fetch()
            dtype = dtype_name(unit.shard.dtype)
            for piece in self.pieces(unit):
                shard = self.logical[piece.name].shard("param", dtype, piece.interval)
                shards.append(LocalShard(shard, unit.shard[piece.start : piece.stop]))
        return shards

    @staticmethod
    def pieces(unit: Unit) -> list[ParamPiece]:
        """Return the pieces of a unit that this rank owns; an empty parameter belongs to the first rank."""
        owned = list(unit.owned)
        if unit.groups.shard_group.rank == 0:
            owned += [ParamPiece(s.name, s.shape, Interval(0, 0), 0) for s in unit.layout.slots if s.numel == 0]
        return owned

    def close(self) -> None:
        """Gather every parameter into memory of its own and take back hooks, buffers and groups. Collective, the first time."""
        if self.closed:  # the parameters may be another's by now
            return
        self.resume()
        self.closed = True
        self.runtime.end_raised()
        self.arrivals.detach()
        for unit in self.units:
            unit.gradients.finish()
            unit.unshard()
        self.runtime.detach()
        for unit in self.units:
            for param in unit.params:
                param.__dict__.pop(_TICKET, None)
        for unit in self.units:
            with torch.no_grad():
                for param in unit.params:
                    param.data = param.data.clone()
        self.units.clear()
        self._where.clear()
        self.pool.close()
        self.seating.drop()


_TICKET = "_ds_zero_ticket"


class _Ticket:
    """On a parameter: which Sharding it belongs to. A pickled or copied one belongs to none."""

    __slots__ = ("owner",)

    def __init__(self, owner: ShardedModel | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[type[_Ticket], tuple[()]]:
        return _Ticket, ()


def sharding_of(param: Tensor) -> ShardedModel | None:
    """Return the ShardedModel that a parameter belongs to; None for a parameter that is not sharded."""
    ticket = getattr(param, _TICKET, None)
    return None if ticket is None or ticket.owner is None else ticket.owner()


def end_sharding(model: nn.Module) -> None:
    """Give a model back whole that is sharded already, as in a notebook's cell that is run again. Collective where it is.

    The optimizers and engines that have sharded it are closed for use. Models may share frozen parameters that stay gathered: these end nothing.
    """
    for param in model.parameters():
        sharding = sharding_of(param)
        if sharding is None or (place := sharding.find(param)) is None:
            continue
        if param.requires_grad or place[0].spec.trained or place[0].releases:
            sharding.end()
