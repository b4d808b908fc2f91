"""The ranks of a job as a mesh of named axes: `MeshSpec` decides, in integers; `Mesh` holds the groups.

Axes, outermost first:

    pipe            pipeline stages
    data_replicate  copies of the sharded model (hybrid sharding, MiCS); gradients are reduced over it
    data_shard      the ranks that share one copy of parameters and optimizer state (ZeRO)
    sequence        parts of one sequence (Ulysses, ring attention)
    tensor          parts of one layer; neighbours, because they talk most

Experts see the same ranks in another way: the data_replicate x data_shard x sequence ranks of a stage are
expert_data x expert, so that one copy of all experts is on neighbours; where `expert` does not divide those, the tensor ranks of the
stage, which take a part of the tokens each, are among them (`experts_cross_tensor`). Besides its axes a mesh names combinations
(`GROUPS`): `data` is what the batch is split over, `gradient` what a dense parameter's gradient is summed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import DeviceMesh

from ds_comm.grid import RankGrid
from ds_comm.groups import Group, common_group
from ds_comm.process_group import ensure_world
from ds_config.errors import CommError, PlanError, set_place
from ds_config.option_checks import check_options

__all__ = ["AXES", "GROUPS", "Mesh", "MeshSpec"]

AXES = ("pipe", "data_replicate", "data_shard", "sequence", "tensor")
_EXPERT_AXES = ("pipe", "expert_data", "expert", "tensor")

# Every group that a mesh has and the axes along which its members differ, in the order in which they are made.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "world": AXES,
        "pipe": ("pipe",),
        "data_replicate": ("data_replicate",),
        "data_shard": ("data_shard",),
        "data": ("data_replicate", "data_shard"),
        "sequence": ("sequence",),
        "gradient": ("data_replicate", "data_shard", "sequence"),
        "shard": ("data_shard", "sequence"),
        "tensor": ("tensor",),
        "model": ("pipe", "tensor"),
        "expert": ("expert",),
        "expert_data": ("expert_data",),
    }
)


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Degrees of the axes. Their product is the world size; `expert` divides data_replicate x data_shard x sequence, or that x tensor."""

    pipe: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        check_options(self)
        bad = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) < 1]
        if bad:
            raise PlanError(
                f"mesh degrees must be at least 1, got {', '.join(bad)}",
                code="mesh-size",
                fix="Leave an axis out to have degree 1.",
            )
        if self._expert_ranks % self.expert:
            raise PlanError(
                f"mesh.expert {self.expert} does not divide the ranks that share a pipeline stage's experts:\n"
                f"  data_replicate {self.data_replicate} x data_shard {self.data_shard} x sequence {self.sequence}"
                f" x tensor {self.tensor} = {self._expert_ranks}",
                code="mesh-expert",
                fix=f"Set mesh.expert to a divisor of {self._expert_ranks}.",
            )

    @classmethod
    def fit(cls, world_size: int, **degrees: int) -> MeshSpec:
        """Build the mesh of `world_size` ranks with these degrees; data_shard is inferred when left out.

        Raises:
            PlanError: the degrees do not multiply to the world size ("mesh-size").
        """
        inferred = "data_shard" not in degrees
        others = math.prod(n for axis, n in degrees.items() if axis not in ("data_shard", "expert"))
        if inferred and others >= 1 and world_size % others == 0:
            degrees["data_shard"] = world_size // others
        spec = cls(**degrees)
        spec.check(world_size)
        return spec

    def check(self, world_size: int) -> None:
        """Raise unless the degrees multiply to `world_size`."""
        if self.world_size == world_size:
            return
        degrees = " x ".join(f"{axis} {n}" for axis in AXES if (n := getattr(self, axis)) > 1) or "no degree above 1"
        others = self.world_size // self.data_shard
        fix = (
            f"Set mesh.data_shard = {world_size // others}, or leave it out to infer it."
            if world_size % others == 0
            else f"Start a multiple of {others} ranks, or lower a degree."
        )
        raise PlanError(
            f"mesh degrees do not multiply to the world size:\n  {degrees} = {self.world_size}, world size {world_size}.",
            code="mesh-size",
            fix=fix,
        )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def expert_data(self) -> int:
        """Copies of each expert within a pipeline stage, and within a tensor slice unless `experts_cross_tensor`."""
        return self._expert_ranks // self.expert

    @property
    def experts_cross_tensor(self) -> bool:
        """Whether ranks of one tensor group have different experts."""
        return self._batch_ranks % self.expert > 0

    @property
    def data(self) -> int:
        """Into how many parts the batch is split."""
        return self.data_replicate * self.data_shard

    @property
    def grid(self) -> RankGrid:
        """Ranks by `AXES`."""
        return RankGrid(AXES, tuple(getattr(self, axis) for axis in AXES))

    @property
    def expert_grid(self) -> RankGrid:
        """The same ranks as experts see them: pipe, expert_data, expert, tensor (of degree 1 if `experts_cross_tensor`)."""
        tensor = 1 if self.experts_cross_tensor else self.tensor
        return RankGrid(_EXPERT_AXES, (self.pipe, self.expert_data, self.expert, tensor))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of `rank` along every axis, the expert axes included."""
        return self.grid.coordinate(rank) | self.expert_grid.coordinate(rank)

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return all groups of `name` (a key of `GROUPS`) as tuples of ranks, in the order of creation."""
        return self._grid_of(name).groups(*GROUPS[name])

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the group of `name` that contains `rank`."""
        return self._grid_of(name).group_of(rank, *GROUPS[name])

    def filter_match(self, **coordinate: int) -> list[int]:
        """Ranks with these indices along axes, in rising order; expert axes may be named, too."""
        dense = {axis: index for axis, index in coordinate.items() if axis in AXES}
        rest = {axis: index for axis, index in coordinate.items() if axis not in AXES}
        if not rest:
            return self.grid.filter_match(**dense)
        experts = set(self.expert_grid.filter_match(**rest))
        return [rank for rank in self.grid.filter_match(**dense) if rank in experts]

    def describe(self, rank: int) -> str:
        """`rank 3/8 data_shard=1 tensor=1`: what error messages start with."""
        return f"rank {rank}/{self.world_size} {self.grid.describe(rank)}".rstrip()

    def _grid_of(self, name: str) -> RankGrid:
        if name not in GROUPS:
            raise ValueError(f"no group {name!r}; a mesh has {tuple(GROUPS)}")
        return self.expert_grid if name.startswith("expert") else self.grid

    @property
    def _batch_ranks(self) -> int:
        return self.data_replicate * self.data_shard * self.sequence

    @property
    def _expert_ranks(self) -> int:
        return self._batch_ranks * (self.tensor if self.experts_cross_tensor else 1)


class Mesh(Mapping[str, Group]):
    """The groups of this rank, by name: `mesh["tensor"]`. Made once by `Mesh.build`, in one order on every rank.

    Attributes:
        spec: The degrees.
        rank: This process's rank in the world.
    """

    def __init__(self, spec: MeshSpec, rank: int, groups: Mapping[str, Group]) -> None:
        missing = set(GROUPS) - set(groups)
        if missing:
            raise ValueError(f"a mesh needs every group of GROUPS, got none for {sorted(missing)}")
        self.spec, self.rank, self._groups = spec, rank, MappingProxyType(dict(groups))

    @classmethod
    def build(cls, spec: MeshSpec) -> Mesh:
        """Make all groups, and the world's if a launcher started several processes. Collective over the world. Names the rank's place in
        later error messages.

        Groups with the same ranks share one process group; none is made for groups of one. Cost: a rank makes the groups that it is in, one a
        name of `GROUPS` at most, whatever the size of the world.
        Raises:
            PlanError: the degrees do not fit the world size ("mesh-size").
        """
        world = ensure_world()
        spec.check(world.size)
        set_place(spec.describe(world.global_rank) if world.size > 1 else "")
        created: dict[tuple[int, ...], Group | None] = {}
        groups: dict[str, Group] = {}
        for name in GROUPS:
            ranks = spec.group_of(name, world.global_rank)
            if ranks not in created:
                created[ranks] = common_group(ranks, name)
            if (group := created[ranks]) is not None:
                groups[name] = Group(name, group.ranks, group.rank, group.link)
        return cls(spec, world.global_rank, groups)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """Build the mesh of a torch DeviceMesh whose dims are a subset of `AXES` in the same order. Collective.

        All ranks of the world call this. Groups that torch created are reused; only the missing combinations are
        created.
        """
        names = device_mesh.mesh_dim_names or ()
        layout = device_mesh.mesh
        if [axis for axis in AXES if axis in names] != list(names) or layout.flatten().tolist() != list(
            range(layout.numel())
        ):
            raise CommError(
                f"a DeviceMesh with dims {tuple(names)} and ranks {layout.tolist()} has no counterpart",
                code="mesh-layout",
                fix=f"Name its dims from {AXES}, in this order, with ranks 0, 1, 2, ... in row-major order.",
            )
        spec = MeshSpec(**dict(zip(names, layout.shape, strict=True)))
        world = ensure_world()
        spec.check(world.size)
        torch_groups = {spec.group_of(name, world.global_rank): device_mesh.get_group(name) for name in names}
        created: dict[tuple[int, ...], Group | None] = {}
        groups: dict[str, Group] = {}
        for name in GROUPS:
            members = spec.group_of(name, world.global_rank)
            if members not in torch_groups and members not in created:
                created[members] = common_group(members, name)
            pg = torch_groups[members] if members in torch_groups else getattr(created.get(members), "link", None)
            groups[name] = Group(name, members, members.index(world.global_rank), pg)
        return cls(spec, world.global_rank, groups)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the same groups as a torch DeviceMesh: one dim per axis of degree above 1, else `data_shard`.

        Raises:
            CommError: there is no process group at all ("comm-world"), so a DeviceMesh has nothing to wrap.
        """
        axes = [axis for axis in AXES if self._groups[axis].size > 1] or ["data_shard"]
        groups = [pg for axis in axes if (pg := self._groups[axis].pg) is not None]
        if len(groups) < len(axes):
            raise CommError(
                "a DeviceMesh needs a process group, and this is a world of one without any",
                code="comm-world",
                fix="Start through a launcher (torchrun --nproc-per-node 1), or do without the DeviceMesh.",
            )
        shape = [self._groups[axis].size for axis in axes]
        layout = torch.arange(self.spec.world_size, device="cpu").reshape(shape)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=tuple(axes))

    def __getitem__(self, name: str) -> Group:
        if name not in self._groups:
            raise KeyError(f"no group {name!r}; a mesh has {tuple(self._groups)}")
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)
