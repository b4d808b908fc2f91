"""Which ranks hold a parameter, which of them share one copy of its state, and the check that they hold the same.

*Family* and *assignment* are those of `ds_comm.reduction_group`. A parameter without an assignment is of the family *dense*: the ranks that the
model was given to. A *replica* is `shard_size` neighbouring ranks that share one copy of the sharded state. Rank r of every replica
holds the same shard; these ranks are *replicas*, and sum its gradient (Zhang et al. 2022, "MiCS").
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ds_comm as comm
from ds_comm import Group, new_local_group, self_group
from ds_comm.groups import node_groups
from ds_comm.metadata import metadata_device
from ds_comm.part_gradients import refuse_dtensors
from ds_comm.reduction_group import Logical, ReductionGroup, param_sharding
from ds_config.errors import PlanError
from ds_zero.layout.model_members import named_members
from ds_zero.layout.units import DENSE, UnitSpec

__all__ = ["Replicas", "check_same", "cut", "family_name", "find_reduction_groups"]


class Replicas(NamedTuple):
    """Where this rank is: the ranks of its replica, those that hold the same shard, and the groups of these that were made for it."""

    shards: Group
    twins: Group
    created: tuple[Group, ...] = ()


def split_replicas(group: Group, shard_size: int | None) -> Replicas:
    """Cut the ranks of `group` into replicas of `shard_size` neighbours; None: one replica. Collective over the group.

    Raises:
        PlanError: `shard_size` does not divide the ranks ("zero-shard-size").
    """
    alone = self_group("alone", group.global_rank)
    size = group.size if shard_size is None else shard_size
    if size < 1 or group.size % size:
        raise PlanError(
            f"{group.size} ranks cannot be cut into replicas of {size}",
            code="zero-shard-size",
            fix=f"Set shard_size to a divisor of {group.size}, or leave it out to share one copy between all ranks.",
        )
    if size == group.size:
        return Replicas(group, alone)
    if size == 1:
        return Replicas(alone, group)
    groups = node_groups(group, size, ("replica", "twins"))
    return Replicas(*groups, groups)


def family_name(tensor: Tensor) -> str:
    """Return the name of a tensor's reduction group."""
    family = param_sharding(tensor).family
    return DENSE if family is None else family.name


def find_reduction_groups(model: nn.Module, group: Group) -> dict[str, ReductionGroup]:
    """Collect the reduction groups of a model's parameters and buffers: dense first, the rest by name.

    Raises:
        PlanError: two reduction groups have one name, or a group lacks this rank ("zero-reduction-group"); a parameter is a DTensor ("comm-dtensor").
    """
    refuse_dtensors(
        named_members(model).values(),
        "ds-zero shards plain parameters itself",
        "Cut the model with ds_parallel.tensor.parallelize_model and say so with its assign(data, divisor), or use torch's fully_shard.",
    )
    declared: dict[str, ReductionGroup] = {}
    for name, tensor in [*named_members(model).items(), *model.named_buffers()]:
        family = param_sharding(tensor).family
        if family is None:
            continue
        known = declared.setdefault(family.name, family)
        if family.name == DENSE or _facts(known) != _facts(family) or family.group.global_rank != group.global_rank:
            raise PlanError(
                f"{name} is of family {family.name!r} over {family.group} with divisor {family.divisor}, and that name stands for "
                f"{'parameters without a family' if family.name == DENSE else f'{known.group} with divisor {known.divisor}'}",
                code="zero-reduction-group",
                fix="Give each set of ranks, divisor and copies a name of its own, and make its groups on their members.",
            )
    return {DENSE: ReductionGroup(DENSE, group, group.size)} | {name: declared[name] for name in sorted(declared)}


def _facts(family: ReductionGroup) -> tuple[object, ...]:
    shards = None if family.shards is None else family.shards.ranks
    return family.group.ranks, family.divisor, shards, family.copies


def cut(family: ReductionGroup, within: Group, shard_size: int | None) -> Replicas:
    """Build the shard group and the replicate group (HSDP) of a reduction group. Collective over its ranks.

    Args:
        within: The ranks that the model was given to.
        shard_size: As in ShardOptions.
    Raises:
        PlanError: the ranks cannot be split into equal groups ("zero-shard-size", "zero-reduction-group").
    """
    group = family.group
    inside = tuple(rank for rank in group.ranks if rank in within.ranks)
    if family.shards is None and len(inside) == group.size:
        return split_replicas(group, shard_size)
    members = inside if family.shards is None else family.shards.ranks
    parts = sorted({tuple(ranks) for ranks in comm.all_gather_json(members, group, unit="shard")})
    if sorted(rank for ranks in parts for rank in ranks) != sorted(group.ranks) or len({len(p) for p in parts}) > 1:
        raise PlanError(
            f"family {family.name!r} is summed over {group}; its state is cut over {parts}, which are not equal parts of it",
            code="zero-reduction-group",
            fix="Cut over groups of one size that have every rank of the sum once.",
        )
    twins = tuple(ranks[members.index(group.global_rank)] for ranks in parts)
    known = family.shards or (within if members == within.ranks else None)
    shards = known or new_local_group(members, "shards")
    replicas = new_local_group(twins, "twins")
    return Replicas(shards, replicas, (replicas,) if known else (shards, replicas))


def check_same(
    specs: Sequence[UnitSpec], logical: Mapping[str, Logical], families: Mapping[str, ReductionGroup]
) -> None:
    """Raise on all ranks of a family that do not hold the same of it. Collective over each family's group.

    They must also have its units at the same place among the units of families that all of them have: that is the order in which
    they communicate.
    """
    _check_present(families)
    for name, family in families.items():
        if family.group.size == 1:
            continue
        common = {n for n, f in families.items() if set(f.group.ranks) >= set(family.group.ranks)}
        ours = [spec for spec in specs if spec.family in common]
        text = repr([_content(spec, logical) for spec in ours]).encode()
        # 63 bits, the same in every process (Python's own hash is not).
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        local_digest = torch.tensor([digest], dtype=torch.int64, device=metadata_device(family.group))
        all_of = local_digest.new_empty(family.group.size)
        comm.all_gather_single(all_of, local_digest, family.group, unit="shard")
        if len(set(all_of.tolist())) > 1:
            of = "" if name == DENSE else f"of family {name!r} "
            raise PlanError(
                f"the ranks hold different models: {sum(len(s.params) for s in ours)} parameters {of}in {len(ours)} units here, "
                f"digests by rank {all_of.tolist()}",
                code="zero-models-differ",
                fix="Build the same model and the same optimizer groups on every rank; assign a family to what differs.",
            )


def _check_present(families: Mapping[str, ReductionGroup]) -> None:
    """Check that every rank of a reduction group has parameters in that group. Collective.

    A rank without them would make the rest of the group wait.

    Raises:
        PlanError: a rank lacks a reduction group ("zero-reduction-group").
    """
    group = families[DENSE].group
    count = torch.tensor([len(families)], dtype=torch.int64, device=metadata_device(group))
    if group.size > 1:
        comm.all_reduce(count, group=group, unit="shard")
    if group.size == 1 or count.item() == group.size:
        return
    groups_by_rank = comm.all_gather_json({n: f.group.ranks for n, f in families.items()}, group, unit="shard")
    for rank, others in zip(group.ranks, groups_by_rank, strict=True):
        for name, ranks in others.items():
            lacking = [
                r for r, has in zip(group.ranks, groups_by_rank, strict=True) if r in ranks and has.get(name) != ranks
            ]
            if lacking:
                raise PlanError(
                    f"on rank {rank} the model has parameters of family {name!r} over ranks {tuple(ranks)}; on ranks {lacking} it has none",
                    code="zero-reduction-group",
                    fix="Give every rank of a family's group a part of it, or leave those ranks out of the group.",
                )


def _content(spec: UnitSpec, logical: Mapping[str, Logical]) -> tuple[Any, ...]:
    # A tied weight has other names, and other modules, on other stages; its logical name is the same.
    params = [(replace(p, name="", module="", logical=""), logical[p.name]) for p in spec.params]
    return (spec.family, spec.strategy, "" if spec.family != DENSE else spec.module, params)
