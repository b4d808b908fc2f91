"""A model cut into units: made once, owns everything it made, gives all of it back.

`Sharding` is what `shard` builds and what the optimizer, checkpoint and access functions work with. A model without an
optimizer (a frozen reference, inference) needs nothing more than this.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import ds_comm as comm
from ds_comm import Group, LocalShard
from ds_comm.placement import Interval, TensorShard
from ds_config.errors import PlanError, UnsupportedError
from ds_zero.hooks import Runtime, Schedule
from ds_zero.host import HostMemory, HostPlan, host_refusal
from ds_zero.layout import Kind, Piece, plan_layout
from ds_zero.moving import KINDS, Away, bring_back, take_away
from ds_zero.nodes import Nodes, Route, split_nodes
from ds_zero.norms import NormScope
from ds_zero.precision import Precision
from ds_zero.replicas import Replicas, split_replicas
from ds_zero.residency import STAGES, Residency
from ds_zero.rows import row_sum, tables
from ds_zero.scattered import is_scattered
from ds_zero.seat import Seat
from ds_zero.store import Pool
from ds_zero.unit import Part, Unit
from ds_zero.units import ModuleInfo, ParamInfo, UnitPolicy, UnitSpec, plan_units

__all__ = ["ShardOptions", "Sharding", "describe", "dtype_name", "sharding_of", "wants_shared"]


_log = logging.getLogger("ds_zero")


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How a model is sharded.

    Attributes:
        stage: ZeRO stage, 0 to 3, or a Residency.
        group: Ranks to shard and average over; None: all.
        precision: `"fp32"`, `"bf16"`, `"fp16"`, a Precision, or None for the model's own formats.
        clip: Largest global gradient norm; `math.inf` measures without clipping; None does neither.
        overlap: Communicate while computing.
        norm: Over which other ranks the norm goes, where tensor or pipeline parallelism cuts the model, too.
        policy: Sizes of units and of what stays gathered.
        strict: Raise on all ranks if the ranks of a step used different parameters.
        layout: How units are laid out: `"flat"`, `"dim0"` or `"whole"`; None: flat for an optimizer that treats elements
            independently of each other, whole for one that needs whole parameters (found out by asking it).
        shard_size: Ranks that share one copy of what is sharded; every such replica holds all of it, and gradients are summed
            over all ranks. None: all ranks share one copy.
        nodes: Which neighbouring ranks are close to each other, and how stage 3 gathers there. None: gathers are flat.
        sparse: Send only the rows of embedding gradients that are not zero, as (index, values). At stage 0.
        memory: `"private"`: every rank keeps its own copies. `"shared"`: the ranks are on one host and keep one copy of
            parameters for all of them, at every stage above 0. `"auto"`: shared where the group's backend is shm.
    """

    stage: int | Residency = 1
    group: Group | dist.ProcessGroup | None = None
    precision: Precision | str | None = None
    clip: float | None = None
    norm: NormScope | None = None
    overlap: bool = True
    policy: UnitPolicy = field(default_factory=UnitPolicy)
    strict: bool = False
    layout: Kind | None = None
    shard_size: int | None = None
    nodes: Nodes | None = None
    sparse: bool = False
    memory: Literal["auto", "private", "shared"] = "auto"

    @property
    def residency(self) -> Residency:
        """The stage as a value."""
        if isinstance(self.stage, Residency):
            return self.stage
        if self.stage not in STAGES:
            raise PlanError(
                f"ZeRO stage {self.stage!r} does not exist",
                code="zero-stage",
                fix="Use a stage from 0 to 3, or a Residency.",
            )
        return STAGES[self.stage]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


def describe(
    model: nn.Module,
    groups: Mapping[int, int],
    layout: Kind | Mapping[int, Kind],
    precision: Precision | None = None,
) -> tuple[list[ParamInfo], list[ModuleInfo]]:
    """The planner's records of a model.

    Args:
        groups: id of a parameter -> number of its optimizer group.
        layout: Of all trained parameters, or by number of the group.
        precision: Parameters to which different rules of it apply do not share a unit.
    """
    modules = [
        ModuleInfo(name, type(module).forward is not nn.Module.forward) for name, module in model.named_modules()
    ]
    params = []
    for name, param in model.named_parameters():
        owner = name.rpartition(".")[0]
        group = groups.get(id(param)) if param.requires_grad else None
        kind: Kind = "flat"
        if group is not None:
            kind = layout if isinstance(layout, str) else layout[group]
        rule = precision.rule_of(name) if precision is not None else None
        info = ParamInfo(name, tuple(param.shape), dtype_name(param.dtype), owner, group, layout=kind, rule=rule)
        params.append(info)
    return params, modules


class Sharding:
    """The units of one model and the hooks that drive them.

    Args:
        model: Equal on every rank in shape; values are made equal to rank 0's.
        groups: id of a parameter -> number of its optimizer group. Parameters not in it are not trained.
        options: How.
        layouts: Layout by number of the optimizer group; by default that of the options for all.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[int, int],
        options: ShardOptions,
        layouts: Mapping[int, Kind] | None = None,
    ) -> None:
        self.model, self.options = model, options
        self.group = comm.as_group(options.group)
        self.precision = Precision.of(options.precision)
        residency = options.residency
        if options.sparse and residency.shard_optim:
            raise PlanError(
                f"sparse gradients were asked for with {residency}: shards of a gradient are summed, not rows",
                code="zero-sparse",
                fix="Use stage 0, or leave it out.",
            )
        params, modules = describe(model, groups, layouts or options.layout or "flat", self.precision)
        self.specs = plan_units(params, modules, residency, options.policy)
        by_name = dict(model.named_parameters())
        _check_same(self.specs, self.group)
        self.unloaded = {name for name, param in by_name.items() if param.is_meta}
        ready = [p for p in by_name.values() if not p.is_meta and not is_scattered(p)]
        _broadcast_differences([*ready, *model.buffers()], self.group)
        self.pool = Pool()
        self.away: list[Away] = []
        self._replicas = split_replicas(self.group, options.shard_size if residency.shard_optim else None)
        host = self._host(by_name, residency)
        route = self._route(residency, host)
        seat = replace(_seat(self.group, self._replicas, residency, self.pool, host), route=route)
        self._own_groups = [] if seat.gathers is seat.shards else [seat.gathers]
        self._unforeseen: Group | None = None
        self.units = [self._unit(spec, by_name, seat, i) for i, spec in enumerate(self.specs)]
        self.seat = seat
        if options.sparse:
            names = tables(model)
            for unit in self.units:
                unit.gradients.rows = row_sum(unit.layout, names, unit.spec.name)
        if host is not None:
            host.barrier("shard")
        largest = max((u.layout.numel for u in self.units), default=0)
        arena = max((u.layout.numel * u.dtypes.accumulate.itemsize for u in self.units), default=0)
        # One is summed while the next is filled; one more where gathers travel beside it and make it slower. At stage 0 the
        # buffers are the gradients, so all may be under way.
        several = 2 if residency.shard_params else 1
        inflight = several * arena if residency.shard_optim else arena * len(self.units)
        self.runtime = Runtime(model, self.units, Schedule(options.overlap, largest, inflight), self.unforeseen)
        self._where = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.grad_factor: Callable[[], float] = lambda: 1.0 / self.group.size
        self.state_of: Callable[[Part], Mapping[str, Any]] = lambda part: {}
        for param in by_name.values():
            setattr(param, _TICKET, _Ticket(self))

    def _unit(self, spec: UnitSpec, params: Mapping[str, Parameter], seat: Seat, number: int) -> Unit:
        members = [params[p.name] for p in spec.params]
        return Unit(spec, members, self.precision.resolve(members[0].dtype, spec.params[0].name), seat, number)

    def _route(self, residency: Residency, host: HostMemory | None) -> Route | None:
        nodes = self.options.nodes
        if nodes is not None and not residency.shard_params:
            raise PlanError(
                f"nodes of {nodes.size} ranks were told with {residency}: no parameter is gathered in forward or backward",
                code="zero-nodes",
                fix="Use stage 3, or leave nodes out.",
            )
        if nodes is not None and host is not None:
            _log.info(
                "zero: the ranks share one copy of the parameters in memory: nodes of %d change nothing", nodes.size
            )
            return None
        return split_nodes(nodes, self._replicas.shards, self.pool)

    def _host(self, params: Mapping[str, Parameter], residency: Residency) -> HostMemory | None:
        group = self._replicas.shards
        if not residency.shard_optim or not wants_shared(self.options.memory, group, params.values()):
            return None
        refusal = host_refusal(group)
        if refusal:
            if self.options.memory == "auto":
                _log.info("zero: memory stays private: %s", refusal)
                return None
            raise UnsupportedError(
                f"memory='shared' was asked for and is not possible: {refusal}",
                code="zero-memory",
                fix="Leave memory at 'auto', or shard over ranks of one host.",
            )
        fulls, slot_bytes = [], 0
        for spec in self.specs:
            layout = plan_layout(spec.shapes, group.size, kind=spec.params[0].layout)
            dtypes = self.precision.resolve(params[spec.params[0].name].dtype, spec.params[0].name)
            fulls.append((layout.numel, dtypes.param))
            if spec.trained:
                width = max(dtypes.reduce.itemsize, dtypes.accumulate.itemsize)
                slot_bytes = max(slot_bytes, layout.numel * width)
        return HostMemory(group, HostPlan(tuple(fulls), slot_bytes)) if fulls else None

    def unforeseen(self) -> Group:
        """The channel for gathers outside the recorded order. Made at the first call, which is collective."""
        if self._unforeseen is None:
            self._unforeseen = self.seat.gathers
            if self.seat.gathers is not self.seat.shards:
                self._unforeseen = _twin(self.seat.shards, "unforeseen")
                self._own_groups.append(self._unforeseen)
        return self._unforeseen

    def keep_gradients_local(self) -> None:
        """From now on gradients stay as each rank computed them, for an optimizer that averages them itself. At stage 0."""
        alone = comm.single_group("alone", self.group.global_rank)
        self.seat = replace(self.seat, replicas=alone)
        for unit in self.units:
            unit.seat = unit.gradients.seat = self.seat

    def find(self, param: Tensor) -> tuple[Unit, int] | None:
        """The unit of a parameter and its number in it; None for a parameter of another model."""
        return self._where.get(id(param))

    def refresh(self) -> None:
        """The shards were written from outside: make every copy of them new. Collective."""
        self.unloaded.clear()
        for unit in self.units:
            unit.mark_updated()
        self.gather_kept()

    def gather_kept(self) -> None:
        """Bring back the full buffers that keep their storage: (N-1)/N of their bytes, all in flight together."""
        kept = [u for u in self.units if not u.releases]
        host = self.seat.host
        if host is not None:
            for unit in kept:
                unit.publish()
            host.barrier("update")
            for unit in kept:
                unit.published()
            return
        for unit in kept:
            unit.start_unshard()
            if not self.options.overlap:
                unit.finish_unshard()
        for unit in kept:
            unit.finish_unshard()

    def adopt_edits(self) -> None:
        """Parameters that every rank edited alike since the last update go into the shards. Before an update, on all ranks."""
        for unit in self.units:
            unit.adopt_edits()
        if self.seat.host is not None:
            for number in self.seat.host.edited():
                self.units[number].adopt_overlay()

    def quiet(self, what: str) -> None:
        """Return when no rank is still in a forward or backward of this model, where others could see a write. Collective."""
        if self.seat.host is not None:
            self.seat.host.barrier(what)

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

    def param_shards(self) -> list[LocalShard]:
        """This rank's elements of every parameter, in master format, as views: `param/<name>`."""
        found = []
        for unit in self.units:
            dtype = dtype_name(unit.shard.dtype)
            for piece in self.pieces(unit):
                shard = TensorShard.flat(f"param/{piece.name}", piece.shape, dtype, piece.interval)
                found.append(LocalShard(shard, unit.shard[piece.start : piece.stop]))
        return found

    @staticmethod
    def pieces(unit: Unit) -> list[Piece]:
        """What this rank owns of a unit; an empty parameter is the first rank's."""
        owned = list(unit.owned)
        if unit.rank == 0:
            owned += [Piece(s.name, s.shape, Interval(0, 0), 0) for s in unit.layout.slots if s.numel == 0]
        return owned

    def close(self) -> None:
        """Gather every parameter into memory of its own and take back hooks, buffers and groups. Collective."""
        self.resume()
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
        self.pool.drop()
        for group in self._own_groups:
            if group.pg is not None:
                dist.destroy_process_group(group.pg)
        self._own_groups.clear()
        if self.seat.route is not None:
            self.seat.route.drop()
        self._replicas.drop()
        self._unforeseen = None


_TICKET = "_ds_zero_ticket"


class _Ticket:
    """On a parameter: which Sharding it belongs to. A pickled or copied one belongs to none."""

    __slots__ = ("owner",)

    def __init__(self, owner: Sharding | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[type[_Ticket], tuple[()]]:
        return _Ticket, ()


def sharding_of(param: Tensor) -> Sharding | None:
    """The Sharding a parameter belongs to; None for a parameter that is not sharded."""
    ticket = getattr(param, _TICKET, None)
    return None if ticket is None or ticket.owner is None else ticket.owner()


def wants_shared(memory: str, group: Group, params: Iterable[Tensor]) -> bool:
    """Whether a model on these ranks is to have one copy a host: asked for, or the group communicates over shared memory."""
    if group.pg is None or group.size == 1 or any(p.device.type != "cpu" for p in params):
        return False
    return memory == "shared" or (memory == "auto" and "cpu:shm" in dist.get_backend_config(group.pg).split(","))


def _seat(group: Group, replicas: Replicas, residency: Residency, pool: Pool, host: HostMemory | None) -> Seat:
    if not residency.shard_optim:
        alone = comm.single_group("alone", group.global_rank)
        return Seat(alone, alone, group, pool)
    shards = gathers = replicas.shards
    if residency.shard_params and shards.pg is not None and host is None:
        gathers = _twin(shards, "gather")
    return Seat(shards, gathers, replicas.twins, pool, host)


def _twin(group: Group, purpose: str) -> Group:
    """The same ranks over a channel of their own. Collective over the group."""
    # Only the members call this. torch then names the group after its ranks, a name that may only be used once at a time,
    # so a group of all ranks, which needs no such thing, is named by a counter.
    part = len(group.ranks) < dist.get_world_size()
    pg = dist.new_group(list(group.ranks), use_local_synchronization=part)
    return Group(f"{group.name}-{purpose}", group.ranks, group.rank, pg)


def _check_same(specs: Sequence[UnitSpec], group: Group) -> None:
    if group.pg is None:
        return
    mine = torch.tensor([hash_of(repr(specs))], dtype=torch.int64)
    all_of = torch.empty(group.size, dtype=torch.int64)
    comm.all_gather_single(all_of, mine, group, unit="shard")
    if len(set(all_of.tolist())) > 1:
        raise PlanError(
            f"the ranks hold different models: {sum(len(s.params) for s in specs)} parameters in {len(specs)} units here, "
            f"digests by rank {all_of.tolist()}",
            code="zero-models-differ",
            fix="Build the same model and the same optimizer groups on every rank.",
        )


def hash_of(text: str) -> int:
    """A 63-bit digest, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _broadcast_differences(tensors: Sequence[Tensor], group: Group) -> None:
    """Make `tensors` equal to rank 0's. Compares digests first, so equal ranks send 16 bytes a tensor."""
    if group.pg is None:
        return
    with torch.no_grad():
        mine = _digests([t.detach() for t in tensors])
        all_of = torch.empty(group.size * mine.numel(), dtype=torch.int64)
        comm.all_gather_single(all_of, mine.flatten(), group, unit="shard")
        table = all_of.view(group.size, -1, 2)
        differs = (table != table[0]).flatten(2).any(2).any(0)
        for i in differs.nonzero().flatten().tolist():
            value = tensors[i].detach().contiguous()
            comm.broadcast(value, group=group, group_src=0, unit="shard")
            tensors[i].data.copy_(value)


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    # Two sums over the bit patterns of each, one of them weighted by position, so that permuted rows differ: [tensors, 2]. One
    # pass over memory; the sums of all tensors are made together, because an operation on a few numbers takes long, too.
    parts = [_row_sums(tensor) for tensor in tensors]
    sums = torch.cat([torch.empty(0, dtype=torch.int64), *(part for pair in parts for part in pair)])
    lengths = torch.tensor([sum(map(len, pair)) for pair in parts], dtype=torch.int64)
    of = torch.repeat_interleave(lengths)
    place = torch.arange(1, len(sums) + 1) - (lengths.cumsum(0) - lengths)[of]
    return torch.zeros(len(parts), 2, dtype=torch.int64).index_add_(0, of, torch.stack([sums, sums * place], 1))


def _row_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the rows of a square of its words, and the words that do not fill one."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    if pad := -words.numel() % 8:
        words = torch.nn.functional.pad(words, (0, pad))
    words = words.view(torch.int64)
    width = max(1, math.isqrt(words.numel()))
    square = words.numel() // width * width
    return words[:square].view(-1, width).sum(1).cpu(), words[square:].cpu()
