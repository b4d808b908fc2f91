"""Bytes per rank before anything is allocated: the same arithmetic the units are made by. No tensor, no group.

Words: *kept* bytes are there between steps, exactly; *passing* bytes come and go within a step and are bounded here:
gathered units, gradient buffers on their way. Activations are not part of model states and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ds_zero.layout import plan_layout
from ds_zero.nodes import Nodes
from ds_zero.precision import Dtypes, Precision
from ds_zero.residency import Residency
from ds_zero.sharding import ShardOptions, describe
from ds_zero.units import ModuleInfo, ParamInfo, UnitSpec, plan_units

__all__ = ["UnitBytes", "ZeroPlan", "in_nodes", "passing_bytes", "plan", "plan_bytes"]


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit on one rank.

    Attributes:
        full: Kept bytes of the parameters in the format forward uses.
        shard: Kept bytes of the master shard; 0 where it is a part of full.
        grads: Bytes of this rank's share of the gradients from backward to update: of memory of its own, which is kept, or of the
            gradients that it is made of, which is not.
        optim: Kept bytes of the optimizer's per-element state.
        gathered: Passing bytes while the unit is in use.
        arena: Passing bytes while its gradients travel.
    """

    full: int = 0
    shard: int = 0
    grads: int = 0
    optim: int = 0
    gathered: int = 0
    arena: int = 0

    @property
    def kept(self) -> int:
        return self.full + self.shard + self.grads + self.optim


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """What will be: the units, and each one's bytes on every rank (ranks hold equal shares).

    Attributes:
        world: Ranks that train the model.
        residency: What is sharded.
        units: In canonical order.
        bytes: One for each unit.
    """

    world: int
    residency: Residency
    units: tuple[UnitSpec, ...]
    bytes: tuple[UnitBytes, ...]

    @property
    def kept(self) -> Mapping[str, int]:
        """Bytes of parameters, masters, gradients and optimizer state on one rank, by category."""
        return {k: sum(getattr(b, k) for b in self.bytes) for k in ("full", "shard", "grads", "optim")}

    @property
    def passing(self) -> int:
        """Most bytes that come and go at a time, see `passing_bytes`."""
        return passing_bytes(self.bytes, self.residency)

    @property
    def peak(self) -> int:
        """Upper bound of model-state bytes on one rank at any time."""
        return sum(self.kept.values()) + self.passing

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units on {self.world} ranks, {self.residency}"]
        lines += [f"  {name:8} {size / 2**20:12.1f} MiB" for name, size in self.kept.items()]
        lines += [f"  passing  {self.passing / 2**20:12.1f} MiB", f"  peak     {self.peak / 2**20:12.1f} MiB"]
        return "\n".join(lines)


def passing_bytes(units: Iterable[UnitBytes], residency: Residency) -> int:
    """Most bytes that come and go at a time: the unit in use, the next one, and gradient buffers.

    Of these there are up to two, one that is summed and one that is filled, and a third where parameters are sharded; as many as
    units where gradients are reduced after the last microbatch only.
    """
    found = list(units)
    gathered = sorted((b.gathered for b in found), reverse=True)[:2]
    arenas = [b.arena for b in found]
    several = (3 if residency.shard_params else 2) * max(arenas, default=0)
    return sum(gathered) + (min(several, sum(arenas)) if residency.shard_grads else sum(arenas))


def plan_bytes(
    unit: UnitSpec, dtypes: Dtypes, world: int, state_tensors: int = 2, *, shared: bool = False
) -> UnitBytes:
    """One unit's bytes on one of `world` ranks, padding included.

    Args:
        state_tensors: Per-element tensors the optimizer keeps (AdamW 2, SGD with momentum 1, SGD 0), in the state's format, else the master's.
        shared: The ranks keep one copy of full between them; each counts its part of it.
    """
    shards = world if unit.residency.shard_optim else 1
    shared = shared and shards > 1
    layout = plan_layout(unit.shapes, shards, kind=unit.params[0].layout)
    releases = unit.residency.shard_params and shards > 1 and not shared
    aliased = dtypes.same and len(layout.segments) == 1 and not releases
    full, own = layout.numel * dtypes.param.itemsize, layout.shard_numel
    found = {
        "arena": 0,
        "full": 0 if releases else full // (shards if shared else 1),
        "gathered": full if releases else 0,
    }
    found["shard"] = 0 if aliased else own * dtypes.master.itemsize
    if not unit.trained:
        return UnitBytes(**found)
    found["optim"] = state_tensors * own * (dtypes.state or dtypes.master).itemsize
    arena, wide = layout.numel * dtypes.reduce.itemsize, dtypes.accumulate != dtypes.reduce
    apart = own * dtypes.accumulate.itemsize
    found["grads"] = apart if shards > 1 or wide else 0
    found["grads" if shards == 1 else "arena"] += arena
    return UnitBytes(**found)


def in_nodes(unit: UnitBytes, nodes: Nodes) -> UnitBytes:
    """The same unit where it is gathered by way of nodes: its secondary copy is kept, its first step passes."""
    piece = unit.gathered // nodes.size
    kept, staged = (piece if nodes.secondary else 0), (piece if nodes.two_steps else 0)
    return replace(unit, full=unit.full + kept, gathered=unit.gathered + staged)


def plan(
    model: nn.Module | Iterable[ParamInfo],
    world: int,
    options: ShardOptions | None = None,
    *,
    state_tensors: int = 2,
    modules: Sequence[ModuleInfo] = (),
) -> ZeroPlan:
    """What `shard` would do with a model on `world` ranks. Works on a model on the meta device, or on records alone.

    Args:
        model: A model whose parameters that require gradients are trained in one group; or the planner's records.
        options: As for `shard`; the group is not used. Memory is taken as shared where that is asked for by name.
        modules: With records, their modules in registration order.
    """
    options = options or ShardOptions()
    if isinstance(model, nn.Module):
        precision = Precision.of(options.precision)
        params, found = describe(model, {id(p): 0 for p in model.parameters()}, options.layout or "flat", precision)
    else:
        params, found = list(model), list(modules) or [ModuleInfo("")]
    precision = Precision.of(options.precision)
    units = plan_units(params, found, options.residency, options.policy)
    formats = [precision.resolve(getattr(torch, u.params[0].dtype), u.params[0].name) for u in units]
    shards = options.shard_size or world
    shared = options.memory == "shared"
    sizes = [
        plan_bytes(u, dtypes, shards, state_tensors, shared=shared) for u, dtypes in zip(units, formats, strict=True)
    ]
    if options.nodes is not None and 1 < options.nodes.size < shards:
        sizes = [in_nodes(found, options.nodes) for found in sizes]
    return ZeroPlan(world, options.residency, units, tuple(sizes))
