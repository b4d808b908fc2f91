"""Where experts are: which ranks share one copy of all of them, and which hold the same ones.

Words: the *batch ranks* of a stage and tensor slice are those that the batch is split over (data and sequence). They are cut into
*expert groups* of `ep_size` ranks, each with one copy of all experts, rank r of a group holding experts r * E / ep_size and on. With
`across_tensor` the ranks of a whole stage are cut so: its tensor-parallel peers have a part of the tokens each, and other experts.
A *data group* are the ranks with the same experts. *Holders* are the ranks over which a gradient of experts is summed: the
data group, and its tensor-parallel peers if those have a part of the tokens each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ds_comm import (
    Group,
    Mesh,
    MeshSpec,
    ReductionGroup,
    common_group,
    ensure_world,
    self_group,
    world_group,
)
from ds_config.errors import PlanError
from ds_moe.shm_dispatch import Windows

__all__ = ["ExpertGroups", "ExpertRanks", "make_places", "place_ranks"]


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The groups of `place_ranks`: lists of ranks of the world, each group in order."""

    expert: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    tensor: tuple[tuple[int, ...], ...]


def place_ranks(spec: MeshSpec, ep_size: int, *, data_first: bool = False, across_tensor: bool = False) -> ExpertRanks:
    """Cut the ranks of a mesh into expert groups. Pure arithmetic.

    Args:
        data_first: Ranks with the same experts are neighbours, not those with different ones.
        across_tensor: Cut all ranks of a stage.

    Raises:
        PlanError: ep_size does not divide the batch ranks ("moe-places").
    """
    expert, data = [], []
    tensor = spec.groups("tensor")
    peers = {rank: group for group in tensor for rank in group}
    batches = spec.groups("gradient")
    if across_tensor:
        batches = sorted({tuple(sorted(r for rank in batch for r in peers[rank])) for batch in batches})
    for batch in batches:
        if ep_size < 1 or len(batch) % ep_size:
            raise PlanError(
                f"expert groups of {ep_size} ranks, and the batch is split over {len(batch)} ranks",
                code="moe-places",
                fix="Use an expert degree (ep_size, autoep_size) that divides the data- and sequence-parallel ranks.",
            )
        copies = len(batch) // ep_size
        near = (
            [batch[i * ep_size : (i + 1) * ep_size] for i in range(copies)],
            [batch[j::ep_size] for j in range(ep_size)],
        )
        far = [batch[i::copies] for i in range(copies)], [batch[j * copies : (j + 1) * copies] for j in range(ep_size)]
        groups, twins = far if data_first else near
        expert += groups
        data += twins
    holders = {
        tuple(sorted({r for rank in group for r in ((rank,) if across_tensor else peers[rank])})) for group in data
    }
    return ExpertRanks(tuple(expert), tuple(data), tuple(sorted(holders)), tuple(tensor))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroups:
    """This rank's groups.

    Attributes:
        expert: Share one copy of all experts.
        data: Hold the same experts.
        holders: Sum gradients of experts.
        tensor: Have the same tokens.
        windows: Memory that the ranks of `expert` share, where they can.
    """

    expert: Group
    data: Group
    holders: Group
    tensor: Group
    windows: Windows = field(default_factory=Windows)

    @property
    def family(self) -> ReductionGroup:
        """What ds-zero needs to know of the experts."""
        ranks = self.expert.size * self.data.size
        if self.holders.size == self.data.size:  # tensor-parallel peers are among them, with a part of the tokens each
            ranks //= self.tensor.size
        return ReductionGroup(f"expert{self.expert.size}", self.holders, ranks)

    def local(self, experts: int) -> range:
        """Return the range of experts of this rank.

        Raises:
            PlanError: they cannot be cut evenly ("moe-places").
        """
        if experts % self.expert.size:
            raise PlanError(
                f"{experts} experts over {self.expert.size} ranks",
                code="moe-places",
                fix="Use an expert degree (ep_size, autoep_size) that divides the number of experts.",
            )
        each = experts // self.expert.size
        return range(self.expert.rank * each, (self.expert.rank + 1) * each)

    def close(self) -> None:
        """Free the windows of shared memory. The groups stay, for the next model of this layout (`ds_comm.common_group`)."""
        self.windows.close()


def alone() -> ExpertGroups:
    """Return expert groups of this rank only, which has all experts."""
    one = self_group("expert", world_group().global_rank)
    return ExpertGroups(one, one, one, one)


def make_places(
    ep_size: int, mesh: Mesh | None = None, *, data_first: bool = False, across_tensor: bool = False
) -> ExpertGroups:
    """Make this rank's groups. Collective over the world; groups that the mesh has are used.

    Args:
        mesh: None: all ranks split the batch.
        across_tensor: As `place_ranks` has it.

    Raises:
        PlanError: ep_size does not divide the ranks that the batch is split over ("moe-places").
    """
    world = ensure_world()
    spec = MeshSpec(data_shard=world.size) if mesh is None else mesh.spec
    ranks = place_ranks(spec, ep_size, data_first=data_first, across_tensor=across_tensor)
    known = {} if mesh is None else {group.ranks: group for group in mesh.values()}
    shared = set() if mesh is None else {group for name in mesh for group in spec.groups(name)}
    created: dict[tuple[int, ...], Group | None] = {}

    def group_of(name: str, groups: Iterable[tuple[int, ...]]) -> Group:
        own_ranks = next(group for group in groups if world.global_rank in group)
        for group in groups:  # in one order on every rank, which makes those that it is in
            if group not in created and group not in shared:
                created[group] = common_group(group, name)
        match = known.get(own_ranks) or created.get(own_ranks)
        if match is None:
            raise RuntimeError(f"no group {name} of {own_ranks}")
        return Group(name, match.ranks, match.rank, match.link)

    expert, data = group_of("expert", ranks.expert), group_of("data", ranks.data)
    holders, tensor = group_of("holders", ranks.holders), group_of("tensor", ranks.tensor)
    return ExpertGroups(expert, data, holders, tensor)
