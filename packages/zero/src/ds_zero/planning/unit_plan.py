"""One plan: what each unit is, where its state lives and how its gradients travel, before anything is allocated. No tensor, no group.

`ShardedModel` makes what stands here and decides nothing more; `plan` makes the same from a model, or from records, for any number of ranks.

Words: *kept* bytes are there between steps, exactly; *passing* bytes come and go within a step and are bounded here:
gathered units, gradient buffers on their way. Activations are not part of model states and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from ds_comm.reduction_group import param_sharding
from ds_zero.layout.dtypes_plan import Dtypes, Precision
from ds_zero.layout.elements import UnitLayout, plan_layout
from ds_zero.layout.shard_options import (
    PLAIN,
    CommFormat,
    NodeTopology,
    OffloadPolicy,
    OptimizerTraits,
    ShardOptions,
    describe,
    dtype_name,
)
from ds_zero.layout.units import ModuleInfo, ParamInfo, ShardingStrategy, UnitBytes, UnitSpec, plan_units
from ds_zero.offload.state_stores import store_kind
from ds_zero.offload.weight_copies import SLOTS

__all__ = [
    "ParamStorage",
    "ReduceStrategy",
    "ShardGroupInfo",
    "UnitBytes",
    "UnitPlan",
    "ZeroPlan",
    "gradient_text",
    "passing_bytes",
    "plan",
    "plan_all",
    "plan_unit",
]


class ParamStorage(Enum):
    """Where a unit's parameters are between uses."""

    PRIVATE = "private"  # every rank keeps all of them
    RELEASED = "released"  # every rank keeps its shard, and gathers the rest for a use
    SHARED = "shared"  # the ranks of a host keep one copy between them


class ReduceStrategy(Enum):
    """How gradients are summed over the ranks that share a unit's state."""

    ARENA = "arena"  # a flat buffer, and the collective of the backend
    POSTING = "posting"  # in memory that the ranks share
    EXCHANGE = "exchange"  # by messages from the memory where autograd made them
    QUANTIZED = "quantized"  # a flat buffer, of which small codes are sent
    SINGLE = "single"  # on a device that is the only one: they stay where autograd made them


@dataclass(frozen=True, slots=True)
class ShardGroupInfo:
    """What planning knows of the ranks of a family.

    Attributes:
        shards: Ranks that share one copy of its state.
        shared: They are on one host, and keep one copy of the parameters.
        anywhere: Messages between them leave from any memory at no cost.
        nodes: Which of them are close to each other; None: gathers are flat.
        on_host: The model is in memory of the host, which gradients need not leave for.
        single: No other rank has the family's parameters.
    """

    shards: int = 1
    shared: bool = False
    anywhere: bool = False
    nodes: NodeTopology | None = None
    on_host: bool = False
    single: bool = False


@dataclass(frozen=True)
class UnitPlan:
    """One unit.

    Attributes:
        spec: Its parameters, their family, and what is kept of them.
        layout: Where each element lives.
        dtypes: In which formats; of parameters that are not trained all are that of the parameter.
        storage, reduction: Which strategy runs it.
        nodes: How it is gathered between nodes; None: flat.
        offload_optimizer: Where its master shard and the optimizer's state are between updates, see `state_stores.py`.
        offload_params: Where its parameters are between uses.
        bytes: On every rank (ranks hold equal shares).
        wire: What of it travels as codes.
        on_host: The model is in memory of the host.
    """

    spec: UnitSpec
    layout: UnitLayout
    dtypes: Dtypes
    storage: ParamStorage
    reduction: ReduceStrategy
    nodes: NodeTopology | None
    offload_optimizer: str | OffloadPolicy
    offload_params: str | OffloadPolicy
    bytes: UnitBytes
    wire: CommFormat = PLAIN
    on_host: bool = False

    @cached_property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.spec.numel

    @cached_property
    def aliased(self) -> bool:
        """Whether the master shard is a range of the buffer that forward uses."""
        separate = self.storage is ParamStorage.RELEASED or not store_kind(self.offload_optimizer).resident
        return self.dtypes.same and len(self.layout.segments) == 1 and not separate

    @cached_property
    def grads_leave(self) -> bool:
        """Whether its summed gradients go to the host at once: the model is on a device, and the optimizer is not."""
        offloaded = self.spec.strategy.shard_optim and isinstance(self.offload_optimizer, OffloadPolicy)
        return self.spec.trained and offloaded and not self.on_host

    @cached_property
    def early(self) -> bool:
        """Whether its update may begin while backward goes on."""
        return (
            self.spec.trained
            and isinstance(self.offload_optimizer, OffloadPolicy)
            and self.offload_optimizer.overlap_ratio > 0
        )

    @property
    def undo(self) -> int:
        """Bytes of host memory for what an early update overwrites: the master shard and the optimizer's state of it."""
        if not self.early:
            return 0
        state = (self.dtypes.state or self.dtypes.master).itemsize * self.spec.params[0].states
        return self.layout.shard_numel * (self.dtypes.master.itemsize + state)

    @cached_property
    def keeps_sent(self) -> bool:
        """Whether a copy of the shard is kept in the format and place that gathers send from."""
        return self.storage is ParamStorage.RELEASED and self.spec.trained and not self.sends_shard

    @cached_property
    def sends_shard(self) -> bool:
        """Whether the master shard is what gathers send: nothing else is made of it."""
        if self.storage is ParamStorage.RELEASED and not self.spec.trained:
            return True
        resident = store_kind(self.offload_optimizer).resident and self.offload_params == "device"
        released = self.storage is ParamStorage.RELEASED
        return (
            self.dtypes.same
            and resident
            and (self.layout.world > 1 or released)
            and self.storage is not ParamStorage.SHARED
        )

    @property
    def sent(self) -> Mapping[str, int]:
        """Bytes that a rank sends to others of its shards for one gather and for one reduction; shared memory sends none."""
        if self.storage is ParamStorage.SHARED:
            return {"gather": 0, "reduce": 0}
        others, dtypes = self.layout.world - 1, self.dtypes
        reduce = others * self.wire.message("reduce", self.layout, dtypes.reduce) if self.spec.trained else 0
        return {"gather": others * self.wire.message("gather", self.layout, dtypes.param), "reduce": reduce}

    def __str__(self) -> str:
        elsewhere = {"host": self.bytes.host, "file": self.bytes.file}
        offloaded = ", ".join(f"{nbytes:,} in {where}" for where, nbytes in elsewhere.items() if nbytes)
        formats = " ".join(
            str(d).removeprefix("torch.") for d in dict.fromkeys((self.dtypes.param, self.dtypes.master))
        )
        return (
            f"{self.name}: {len(self.spec.params)} parameters, {self.numel:,} elements, {self.spec.family}, {formats}, "
            f"{self.layout.kind} over {self.layout.world}, {self.storage.value}, {self.reduction.value}, {self.offload_optimizer}, {self.bytes.persistent_bytes:,} bytes{offloaded and f' and {offloaded}'}"
        )


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """What will be: the units, and each one's bytes on every rank.

    Attributes:
        world: Ranks that train the model.
        residency: What is sharded.
        units: In canonical order.
    """

    world: int
    residency: ShardingStrategy
    units: tuple[UnitPlan, ...]

    @property
    def persistent_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters, masters, gradients and optimizer state on one rank, by category."""
        return {k: sum(getattr(u.bytes, k) for u in self.units) for k in ("full", "shard", "grads", "optim")}

    @property
    def host(self) -> int:
        """Bytes of host memory on one rank: what stays there, and what is on its way to and from files."""
        staged = 0
        for role in ("offload_optimizer", "offload_params"):
            for place in {p for u in self.units if isinstance(p := getattr(u, role), OffloadPolicy)}:
                staged += place.staging([u.bytes for u in self.units if getattr(u, role) == place])
        staged += SLOTS * max((unit.bytes.staged for unit in self.units), default=0)
        return sum(unit.bytes.host for unit in self.units) + staged

    @property
    def file(self) -> int:
        """Bytes in scratch files of one rank."""
        return sum(unit.bytes.file for unit in self.units)

    @property
    def early(self) -> int:
        """Units that may be updated while backward goes on."""
        return sum(unit.early for unit in self.units)

    @property
    def undo(self) -> int:
        """Bytes of `host` for what early updates overwrite."""
        return sum(unit.undo for unit in self.units)

    @property
    def gradient_formats(self) -> tuple[str, ...]:
        """In which formats gradients travel, are summed and add up, one line each."""
        trained = [unit for unit in self.units if unit.spec.trained]
        return tuple(dict.fromkeys(gradient_text(unit.dtypes.reduce, unit.dtypes.accumulate) for unit in trained))

    @property
    def passing(self) -> int:
        """Most bytes that come and go at a time, see `passing_bytes`."""
        return passing_bytes((unit.bytes for unit in self.units), self.residency)

    @property
    def peak(self) -> int:
        """Upper bound of model-state bytes on one rank at any time."""
        return sum(self.persistent_bytes.values()) + self.passing

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units on {self.world} ranks, {self.residency}"]
        lines += [f"  {name:8} {size / 2**20:12.1f} MiB" for name, size in self.persistent_bytes.items()]
        elsewhere = {"host": self.host, "file": self.file}
        lines += [f"  {name:8} {size / 2**20:12.1f} MiB" for name, size in elsewhere.items() if size]
        if self.early:
            undo = f"{self.undo / 2**20:.1f} MiB of host keep what they overwrite"
            lines += [f"  early    {self.early:10} units are updated while backward goes on; {undo}"]
        if self.world > 1:
            lines += [f"  gradients travel in {formats}" for formats in self.gradient_formats]
        lines += [f"  passing  {self.passing / 2**20:12.1f} MiB", f"  peak     {self.peak / 2**20:12.1f} MiB"]
        return "\n".join(lines)


def gradient_text(reduce: torch.dtype, accumulate: torch.dtype) -> str:
    """Describe the formats of gradients between ranks."""
    travel, total = dtype_name(reduce), dtype_name(accumulate)
    summed = "" if reduce.itemsize >= 4 else f" (summed in float32 on shm and gloo, in {travel} by NCCL)"
    return f"{travel}{summed}, add up in {total}"


def passing_bytes(units: Iterable[UnitBytes], residency: ShardingStrategy) -> int:
    """Return the peak of transient bytes: the unit in use, the prefetched unit, and gradient buckets.

    Of the buckets there are up to two, one that is reduced and one that is filled, and a third where parameters are
    sharded; as many
    as units where gradients are reduced after the last microbatch only. Where gradients go to the host, two units are in use by copies.
    """
    usages = list(units)
    gathered = sorted((b.gathered for b in usages), reverse=True)[:2]
    arenas = [b.arena for b in usages]
    several = (3 if residency.shard_params else 2) * max(arenas, default=0)
    copied = max((b.copied for b in usages), default=0)
    return sum(gathered) + copied + (min(several, sum(arenas)) if residency.shard_grads else sum(arenas))


def plan_unit(
    spec: UnitSpec,
    precision: Precision,
    ranks: ShardGroupInfo,
    tier: str | OffloadPolicy = "device",
    param_tier: str | OffloadPolicy = "device",
    wire: CommFormat = PLAIN,
) -> UnitPlan:
    """Decide about one unit of a family that lives on `ranks`. Padding is counted."""
    param_tier = param_tier if spec.strategy.shard_params else "device"
    if param_tier != "device":
        ranks = replace(ranks, shared=False)
    shards = ranks.shards if spec.strategy.shard_optim else 1
    layout = plan_layout(spec.shapes, shards, kind=spec.params[0].layout)
    dtypes = precision.resolve(getattr(torch, spec.params[0].dtype), spec.params[0].name)
    dtypes = dtypes if spec.trained else dtypes.frozen
    storage, reduction = ParamStorage.PRIVATE, ReduceStrategy.ARENA
    if shards == 1 and param_tier != "device":
        storage = ParamStorage.RELEASED
    if shards > 1 and ranks.shared:
        storage, reduction = ParamStorage.SHARED, ReduceStrategy.POSTING
    elif shards > 1:
        storage = ParamStorage.RELEASED if spec.strategy.shard_params else ParamStorage.PRIVATE
        reduction = ReduceStrategy.EXCHANGE if ranks.anywhere else ReduceStrategy.ARENA
    nodes = ranks.nodes if storage is ParamStorage.RELEASED else None
    form = PLAIN
    if shards > 1 and not ranks.shared and dtypes.param.is_floating_point:
        form = wire.of_unit(trained=spec.trained, gathered=storage is ParamStorage.RELEASED)
        form.check_format(dtypes.param)
        reduction = ReduceStrategy.QUANTIZED if form.codes_sums else reduction
    if not spec.trained:  # what it is sent from is all there is of it
        tier = param_tier
    unit = UnitPlan(spec, layout, dtypes, storage, reduction, nodes, tier, param_tier, UnitBytes(), form, ranks.on_host)
    if ranks.single and not ranks.on_host and not unit.grads_leave:
        unit = replace(unit, reduction=ReduceStrategy.SINGLE)
    usage = _bytes(unit)
    if spec.trained and isinstance(param_tier, OffloadPolicy):
        usage = param_tier.planned_params(usage)
    return replace(unit, bytes=store_kind(unit.offload_optimizer).planned(usage))


def _bytes(unit: UnitPlan) -> UnitBytes:
    layout, dtypes, shards = unit.layout, unit.dtypes, unit.layout.world
    full, shard_numel = layout.numel * dtypes.param.itemsize, layout.shard_numel
    persistent = {
        ParamStorage.PRIVATE: full,
        ParamStorage.RELEASED: shard_numel * dtypes.param.itemsize if unit.keeps_sent else 0,
        ParamStorage.SHARED: full // shards,
    }
    usage = UnitBytes(
        full=persistent[unit.storage],
        shard=0 if unit.aliased else shard_numel * dtypes.master.itemsize,
        gathered=full if unit.storage is ParamStorage.RELEASED else 0,
    )
    if unit.nodes is not None:  # by way of nodes: its secondary copy is kept, its first step passes
        piece = usage.gathered // unit.nodes.size
        kept_near, staged = (piece if unit.nodes.secondary_partition else 0), (piece if unit.nodes.hierarchical else 0)
        usage = replace(usage, full=usage.full + kept_near, gathered=usage.gathered + staged)
    gather, reduce, errors = unit.wire.buffers(layout, dtypes)
    usage = replace(usage, gathered=usage.gathered + gather)
    if not unit.spec.trained:
        return usage
    arena, wide = layout.numel * dtypes.reduce.itemsize, dtypes.accumulate != dtypes.reduce
    apart = shard_numel * dtypes.accumulate.itemsize if shards > 1 or wide else 0
    arena, apart = arena + reduce, apart + errors
    optim = unit.spec.params[0].states * shard_numel * (dtypes.state or dtypes.master).itemsize
    if unit.grads_leave:
        return _leaving(unit, replace(usage, optim=optim, grads=errors, arena=arena))
    if shards == 1 and not wide:  # the sum is in the memory of its terms
        return replace(usage, optim=optim, grads=apart + arena)
    if unit.reduction is ReduceStrategy.SINGLE:
        return replace(usage, optim=optim, grads=apart)
    return replace(usage, optim=optim, grads=apart, arena=arena)


def _leaving(unit: UnitPlan, usage: UnitBytes) -> UnitBytes:
    """Count gradients that go to the host, and weights that come back. Pure.

    Args:
        usage: Of the unit on its device; its arena holds all of the unit's gradients.
    """
    dtypes, numel, policy = unit.dtypes, unit.layout.shard_numel, unit.offload_optimizer
    landing = numel * dtypes.reduce.itemsize
    accumulates = isinstance(policy, OffloadPolicy) and policy.accumulates
    host = landing
    if accumulates and unit.spec.strategy.shard_grads:  # every backward's sum lands, and is added
        host += numel * dtypes.accumulate.itemsize
    elif accumulates:  # they add up on the device, and land once
        host = numel * max(dtypes.accumulate.itemsize, dtypes.reduce.itemsize)
    if unit.layout.world > 1:  # shards of sums: two in reductions, two in use by copies
        copied = 4 * landing
    else:  # the arena is the sum: one is filled, two are copied from
        copied = 0 if unit.spec.strategy.shard_params else usage.arena
    staged = numel * dtypes.param.itemsize if unit.offload_params == "device" else 0
    return replace(usage, copied=copied, staged=staged, host=usage.host + host)


def plan(
    model: nn.Module | Iterable[ParamInfo],
    world: int,
    options: ShardOptions | None = None,
    *,
    state_tensors: int = 2,
    modules: Sequence[ModuleInfo] = (),
    families: Mapping[str, int] | None = None,
) -> ZeroPlan:
    """Plan how `shard` would shard a model on `world` ranks. Works on a meta-device model, or on records only.

    Args:
        model: A model whose parameters that require gradients are trained in one group; or the planner's records.
        options: As for `shard`; the group is not used. Memory counts as shared only where that is asked for by name.
        state_tensors: Per element, of the optimizer, where `model` is a module; records carry the number themselves.
        modules: With records, their modules in registration order.
        families: With records, the number of ranks of each reduction group; parameters of unlisted groups use `world`.
    """
    options = options or ShardOptions()
    precision = Precision.of(options.precision)
    sizes = dict(families or {})
    if isinstance(model, nn.Module):
        habits = OptimizerTraits(options.layout or "flat", state_tensors)
        params, infos = describe(model, {id(p): 0 for p in model.parameters()}, habits, precision)
        sizes |= {f.name: f.group.size for p in model.parameters() if (f := param_sharding(p).family) is not None}
    else:
        params, infos = list(model), list(modules) or [ModuleInfo("")]
    specs = plan_units(params, infos, options.residency, options.policy)
    options.quantized_comm.check(options.residency)
    ranks = {spec.family: ranks_of(sizes.get(spec.family, world), options) for spec in specs}
    return ZeroPlan(world, options.residency, plan_all(specs, options, ranks))


def plan_all(
    specs: Sequence[UnitSpec], options: ShardOptions, ranks: Mapping[str, ShardGroupInfo]
) -> tuple[UnitPlan, ...]:
    """Decide about all units of a model whose families live on `ranks`."""
    precision, tiers = Precision.of(options.precision), options.offload_policies(specs)
    param_tiers = options.param_offload_policies(specs, [ranks[spec.family].shards for spec in specs])
    return tuple(
        plan_unit(spec, precision, ranks[spec.family], tier, param_tier, options.quantized_comm)
        for spec, tier, param_tier in zip(specs, tiers, param_tiers, strict=True)
    )


def ranks_of(world: int, options: ShardOptions) -> ShardGroupInfo:
    """Build the ShardGroupInfo that planning assumes for ranks that do not exist yet."""
    shards = min(options.shard_size or world, world)
    nodes = options.nodes if options.nodes is not None and 1 < options.nodes.size < shards else None
    return ShardGroupInfo(shards, shared=options.memory == "shared", nodes=nodes, single=world == 1)
