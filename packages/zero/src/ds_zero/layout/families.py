"""Which ranks each parameter of a model lives on, and where a unit of such parameters communicates.

Words: *family* and *assignment* are those of `ds_comm.family`; what nobody assigned is of the family *dense*, the ranks that the
model was given to. A family is *apart* if its gradients are summed over other ranks, too (a weight tied over pipeline stages): those
ranks do not run this backward, so nothing in it may wait for them. A unit's *seat* is its family and the groups it uses; families of
the same ranks share groups. A *logical* tensor is what a checkpoint holds; a parameter is a box of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import ds_comm as comm
from ds_comm import Group, part_group
from ds_comm.family import Assignment, Family, assignment_of
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import PlanError
from ds_zero.layout.replicas import Replicas, split_replicas
from ds_zero.layout.units import DENSE
from ds_zero.runtime.scattered import scatter_of

__all__ = ["Logical", "cut", "family_name", "find_families", "logical_of"]


def family_name(tensor: Tensor) -> str:
    """The name of a tensor's family."""
    family = assignment_of(tensor).family
    return DENSE if family is None else family.name


def find_families(model: nn.Module, group: Group) -> dict[str, Family]:
    """The families of a model's parameters and buffers: dense first, the others by name.

    Raises:
        PlanError: two families have one name, or one does not have this rank ("zero-family").
    """
    found: dict[str, Family] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        family = assignment_of(tensor).family
        if family is None:
            continue
        known = found.setdefault(family.name, family)
        if family.name == DENSE or _facts(known) != _facts(family) or family.group.global_rank != group.global_rank:
            raise PlanError(
                f"{name} is of family {family.name!r} over {family.group} with divisor {family.divisor}, and that name stands for "
                f"{'parameters without a family' if family.name == DENSE else f'{known.group} with divisor {known.divisor}'}",
                code="zero-family",
                fix="Give each set of ranks, divisor and copies a name of its own, and make its groups on their members.",
            )
        scatter = scatter_of(tensor)
        if scatter is not None and scatter.group.ranks != family.group.ranks:
            raise PlanError(
                f"{name} is of family {family.name!r} over {family.group}, and Init made it equal on {scatter.group}",
                code="zero-family",
                fix="Build parameters that differ between ranks outside Init, or give Init the family's group.",
            )
    return {DENSE: Family(DENSE, group, group.size)} | {name: found[name] for name in sorted(found)}


def _facts(family: Family) -> tuple[object, ...]:
    shards = None if family.shards is None else family.shards.ranks
    return family.group.ranks, family.divisor, shards, family.copies


def cut(family: Family, within: Group, shard_size: int | None) -> Replicas:
    """The ranks that share one copy of a family's state, and their twins. Collective over the family's group.

    Args:
        within: The ranks that the model was given to.
        shard_size: As in ShardOptions.
    Raises:
        PlanError: the ranks cannot be cut alike ("zero-shard-size", "zero-family").
    """
    group = family.group
    inside = tuple(rank for rank in group.ranks if rank in within.ranks)
    if family.shards is None and len(inside) == group.size:
        return split_replicas(group, shard_size)
    mine = inside if family.shards is None else family.shards.ranks
    parts = sorted({tuple(ranks) for ranks in comm.all_gather_json(mine, group, unit="shard")})
    if sorted(rank for ranks in parts for rank in ranks) != sorted(group.ranks) or len({len(p) for p in parts}) > 1:
        raise PlanError(
            f"family {family.name!r} is summed over {group}; its state is cut over {parts}, which are not equal parts of it",
            code="zero-family",
            fix="Cut over groups of one size that have every rank of the sum once.",
        )
    twins = tuple(ranks[mine.index(group.global_rank)] for ranks in parts)
    made = []
    shards = family.shards or (within if mine == within.ranks else None)
    if shards is None:
        shards = part_group(mine, "shards")
        made.append(shards)
    replicas = part_group(twins, "twins")
    return Replicas(shards, replicas, (*made, replicas))


# ---- logical tensors


@dataclass(frozen=True, slots=True)
class Logical:
    """Which part of which logical tensor a parameter is: an `Assignment` in which nothing is left out."""

    name: str
    shape: tuple[int, ...]
    box: Box

    def shard(self, prefix: str, dtype: str, interval: Interval, suffix: str = "") -> TensorShard:
        """Elements `interval` of the flattened parameter."""
        return TensorShard(f"{prefix}/{self.name}{suffix}", self.shape, dtype, self.box, interval)

    @property
    def whole(self) -> bool:
        """Whether the parameter is all of the logical tensor."""
        return self.box.shape == self.shape


def logical_of(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Logical:
    """What tensor `name` is a part of.

    Args:
        shape: The parameter's true shape, if `tensor` does not have it.
    Raises:
        PlanError: it does not have the shape of its box ("zero-family").
    """
    said: Assignment = assignment_of(tensor)
    own = tuple(tensor.shape) if shape is None else shape
    box, of = said.box or Box.whole(own), said.shape or own
    inside = len(box.shape) == len(of) and all(o + s <= n for o, s, n in zip(box.offset, box.shape, of, strict=True))
    if box.shape != own or not inside:
        raise PlanError(
            f"{name} has shape {own} and was assigned {box} of a tensor of shape {of}",
            code="zero-family",
            fix="Assign the box that the parameter is, in the logical tensor's dims.",
        )
    return Logical(said.name or name, of, box)
