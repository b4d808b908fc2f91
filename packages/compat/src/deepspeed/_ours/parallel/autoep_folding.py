"""`deepspeed.module_inject.auto_ep_folding`: experts beside tensor parallelism, in rank numbers, over `ds_moe.place_ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed._ours.base.raising import refused
from ds_comm import MeshSpec
from ds_moe import place_ranks

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ParallelFoldingSpec:
    """Degrees: of the world, of a stage, and the data ranks of dense parameters (dp) and of experts (edp) in it."""

    world_size: int
    pp_size: int
    stage_size: int
    tp_size: int
    dp_size: int
    ep_size: int
    etp_size: int
    edp_size: int
    mp_mode: str = "tp"


@dataclass(frozen=True)
class FoldingGroupTables:
    """All groups of each kind."""

    tp_groups: tuple[Ranks, ...]
    dense_dp_groups: tuple[Ranks, ...]
    ep_groups: tuple[Ranks, ...]
    edp_groups: tuple[Ranks, ...]


@dataclass(frozen=True)
class FoldingGroupHandles:
    """A rank's process groups, and their ranks."""

    spec: ParallelFoldingSpec
    tp_group: Any
    dense_dp_group: Any
    ep_group: Any
    edp_group: Any
    ep_group_name: str
    tp_ranks: Ranks
    dense_dp_ranks: Ranks
    ep_ranks: Ranks
    edp_ranks: Ranks


def build_folding_spec(
    *, world_size: int, pp_size: int, tp_size: int, ep_size: int, etp_size: int = 1, mp_mode: str = "tp"
) -> ParallelFoldingSpec:
    """Work out the degrees.

    Raises:
        PlanError: one does not divide the ranks that it splits ("compat-argument"); a ValueError, too.
    """
    stage, width = world_size // max(pp_size, 1), ep_size * etp_size
    experts = "expert_parallel.autoep_size * expert_parallel.expert_tensor_parallel_size"
    for key, degree, of, ranks, values in (
        ("pp_size", pp_size, "world_size", world_size, "pp_size"),
        ("tensor_parallel.autotp_size", tp_size, "the stage size", stage, "autotp_size"),
        (experts, width, "the stage size", stage, "expert-width"),
    ):
        if degree < 1 or ranks % degree:
            divisors = [candidate for candidate in range(1, ranks + 1) if ranks % candidate == 0]
            raise refused("degree-of-stage", key, degree, of, ranks, values, divisors)
    return ParallelFoldingSpec(
        world_size, pp_size, stage, tp_size, stage // tp_size, ep_size, etp_size, stage // width, mp_mode
    )


def expected_folding_group_tables(spec: ParallelFoldingSpec) -> FoldingGroupTables:
    """List the groups. Expert groups are of neighbours, whatever tensor group they are in."""
    mesh = MeshSpec(pipe=spec.pp_size, data_shard=spec.dp_size, tensor=spec.tp_size)
    ranks = place_ranks(mesh, spec.ep_size, across_tensor=True)
    return FoldingGroupTables(tuple(mesh.groups("tensor")), tuple(mesh.groups("gradient")), ranks.expert, ranks.data)


def local_folding_ranks(global_rank: int, spec: ParallelFoldingSpec) -> dict[str, Ranks]:
    """Return the group of each kind that a rank is in."""
    tables = vars(expected_folding_group_tables(spec))
    return {
        kind.removesuffix("_groups"): next(group for group in groups if global_rank in group)
        for kind, groups in tables.items()
    }


def assert_group_matches_spec(
    existing_rank_lists: Mapping[str, Sequence[Ranks]] | Sequence[Sequence[Ranks]], spec: ParallelFoldingSpec, *, group_kind: str = "ep_edp"
) -> None:  # fmt: skip
    """Check expert groups, and those of their copies, that exist already.

    Raises:
        PlanError: one is not among the groups of `spec` ("compat-argument"); a RuntimeError, too.
    """
    tables = expected_folding_group_tables(spec)
    lists = existing_rank_lists
    pairs = (lists.get("ep", ()), lists.get("edp", ())) if isinstance(lists, Mapping) else lists
    for groups, wanted in zip(pairs, (tables.ep_groups, tables.edp_groups), strict=True):
        other = [tuple(group) for group in groups if tuple(group) not in wanted]
        if other:
            raise refused("folding-groups", group_kind, other, wanted)
