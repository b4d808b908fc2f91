"""Where a unit communicates: the ranks and channels of a family, the way of gathers between nodes, and the memory that ranks share.

A *node* is `size` neighbouring ranks of those that share one copy of the sharded state. The group *inside* has the ranks of this node,
*across* those with this rank's place in every node. Two ways, which go together:

    two steps   Each rank first gathers its place's chunks across, then all of them inside (`ds_comm.hierarchical`).
    secondary   What a gather brought is kept in pieces inside the node, 1/size of it a rank, until the next update. Until then
                gathers stay inside the node. Reference: Wang et al. 2023, "ZeRO++", section 3.2 (hpZ).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm as comm
from ds_accel import streams
from ds_comm import Group, destroy_group, destroy_when_dropped, duplicate_group, groups
from ds_comm.buffer_pool import BufferPool
from ds_comm.codecs.hierarchy import Hierarchy
from ds_comm.hierarchical import HierarchicalGather
from ds_comm.reduction_group import ReductionGroup
from ds_comm.rehearsal.staging import asked_backends
from ds_comm.shm.shm_units import ShmUnitMemory, host_refusal
from ds_config.errors import PlanError, UnsupportedError
from ds_zero.layout.elements import UnitLayout
from ds_zero.layout.reduction_groups import cut
from ds_zero.layout.shard_options import NodeTopology, ShardOptions
from ds_zero.layout.units import DENSE
from ds_zero.planning.unit_plan import ShardGroupInfo, UnitPlan

__all__ = ["GroupSet", "GroupTable", "Secondary", "node_groups", "sends_from_anywhere"]

_log = logging.getLogger("ds_zero")


class Secondary:
    """This rank's piece of the copy of one unit that its node keeps between updates.

    Attributes:
        valid: Whether the piece is what the shards hold. Cleared, on all ranks alike, by whoever writes the shards.
    """

    def __init__(self, route: HierarchicalGather, layout: UnitLayout, unit: str) -> None:
        self.valid = False
        self._route, self._layout, self._unit = route, layout, unit
        self._piece: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return 0 if self._piece is None else self._piece.nbytes

    def gather(self, full: Tensor) -> list[comm.Work]:
        """Start to fill the full buffer from the pieces of this node's ranks."""
        if self._piece is None:
            raise RuntimeError(f"unit {self._unit} has no secondary copy to gather from")
        pieces = self._pieces(self._piece)
        return [self._route.gather_inside(full[start:stop], piece, self._unit) for start, stop, piece in pieces]

    def keep(self, full: Tensor) -> None:
        """Copy this rank's piece of the gathered full buffer to the secondary partition, unless that is valid."""
        if self.valid:
            return
        if self._piece is None:
            self._piece = torch.empty(
                self._layout.numel // self._route.inside.size, dtype=full.dtype, device=full.device
            )
        with torch.no_grad():
            for start, _, piece in self._pieces(self._piece):
                piece.copy_(full[start + self._route.inside.rank * piece.numel() :][: piece.numel()])
        self.valid = True

    def drop(self) -> int:
        """Give the memory back; returns its bytes."""
        freed, self._piece, self.valid = self.nbytes, None, False
        return freed

    def _pieces(self, buffer: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop) of each segment in the full buffer, and this rank's piece of the segment."""
        size = self._route.inside.size
        parts = buffer.split([(stop - start) // size for start, stop in self._layout.spans])
        return ((start, stop, part) for (start, stop), part in zip(self._layout.spans, parts, strict=True))


@dataclass(frozen=True, eq=False)
class GroupSet:
    """What the units of one family share.

    Attributes:
        reduction_group: Over which ranks their gradients are summed, and how that sum counts.
        external: Some of those ranks do not run this backward; see `reduction_groups.py`.
        shard_group: The ranks that hold the shards of a unit; a group of one holds it whole.
        gather_group: The same ranks, over channels of their own, so that gathers and reductions cannot get in each other's order.
        replicate_group: The ranks that hold the same shard; gradients are summed over `shard_group` and then over `replicate_group`.
        pool: Where gradient buffers come from.
        shared: The ranks of `shard_group` keep one copy of the parameters between them ...
        host: ... in this memory.
        nodes: Which of the ranks are near, and what gathers make of it; None: nothing.
        route: The way of gathers between nodes; None: flat.
        levels: How codes of gradients do; None: flat.
        tables: Names of parameters of whose gradients only the rows that are not zero are sent.
        created: The groups that were made for the model, to which a late one is added.
    """

    reduction_group: ReductionGroup
    external: bool
    shard_group: Group
    gather_group: Group
    replicate_group: Group
    pool: BufferPool
    shared: bool = False
    host: ShmUnitMemory | None = None
    nodes: NodeTopology | None = None
    route: HierarchicalGather | None = None
    levels: Hierarchy | None = None
    tables: frozenset[str] = frozenset()
    created: list[Group] = field(default_factory=list)
    _late: list[Group] = field(default_factory=list)  # made when first needed, at most one

    @cached_property
    def size(self) -> int:
        """Ranks a gradient is summed over."""
        return self.shard_group.size * self.replicate_group.size

    @cached_property
    def counts(self) -> int:
        """How often each element of a gradient is there, over all ranks."""
        return self.replicate_group.size * self.reduction_group.copies

    def late_group(self) -> Group:
        """Return the group for all-gathers outside the recorded order.

        Created at the first call, which is collective over `shard_group`.
        """
        if not self._late:
            apart = self.gather_group is not self.shard_group
            late = duplicate_group(self.shard_group, "unforeseen", None, urgent=True) if apart else self.gather_group
            self._late.append(late)
            self.created.extend(self._late if apart else ())
        return self._late[0]


class GroupTable:
    """The group sets of one model by reduction group, and the groups made for them. Construction is collective over each family's group.

    Args:
        families: Dense first; the others in the same order on every rank.
        host: Whether all parameters are on the host.
        tables: See `GroupSet`.
    Attributes:
        hosts: Shared memories, each once, in the order of families; none before `share`.
    """

    def __init__(
        self,
        families: Mapping[str, ReductionGroup],
        pool: BufferPool,
        options: ShardOptions,
        *,
        host: bool,
        tables: frozenset[str] = frozenset(),
    ) -> None:
        self.pool, self.options, self._host, self._tables = pool, options, host, tables
        self._dense = families[DENSE].group
        self._created_groups: list[Group] = []
        if host:
            destroy_when_dropped(self, self._created_groups)
        self._dense_shards: Group | None = None
        self.group_sets: dict[str, GroupSet] = {}
        self.hosts: list[ShmUnitMemory] = []
        if options.nodes is not None and not options.residency.shard_params:
            raise PlanError(
                f"nodes of {options.nodes.size} ranks were told with {options.residency}: no parameter is gathered in forward or "
                "backward",
                code="zero-nodes",
                fix="Use stage 3, or leave nodes out.",
            )
        # Families of the same ranks share groups, and so one shared memory.
        self._alike: dict[tuple[object, ...], list[str]] = {}
        for name, family in families.items():
            shards = None if family.shards is None else family.shards.ranks
            alike = self._alike.setdefault((family.group.ranks, shards), [])
            known = self.group_sets[alike[0]] if alike else self._make(family)
            self.group_sets[name] = replace(known, reduction_group=family)
            alike.append(name)

    def _make(self, family: ReductionGroup) -> GroupSet:
        apart = not set(family.group.ranks) <= set(self._dense.ranks)
        if not self.options.residency.shard_optim:
            alone = comm.self_group("alone", family.group.global_rank)
            return GroupSet(
                family, apart, alone, alone, family.group, self.pool, tables=self._tables, created=self._created_groups
            )
        replicas = cut(family, self._dense, self.options.shard_size)
        self._created_groups += replicas.created
        self._dense_shards = self._dense_shards or replicas.shards
        shards = gathers = replicas.shards
        shared = self._shares(shards)
        nodes = self._nodes(shards, shared)
        route = None if nodes is None else self._route(shards, nodes)
        if self.options.residency.shard_params and shards.size > 1 and not shared:
            gathers = duplicate_group(shards, "gather", None, urgent=True)  # a layer waits for them, nobody for a sum
            self._created_groups.append(gathers)
        levels = None if shared else self.options.quantized_comm.levels(shards)
        self._created_groups += () if levels is None else (levels.inside, levels.across)
        return GroupSet(
            family, apart, shards, gathers, replicas.twins, self.pool, shared, None, nodes, route, levels,
            created=self._created_groups,
        )  # fmt: skip

    def _shares(self, group: Group) -> bool:
        # What is kept elsewhere between uses is nobody else's.
        memory = self.options.memory if self.options.offload_params == "device" else "private"
        if not self._host or memory == "private" or group.size == 1:
            return False
        if memory == "auto" and "cpu:shm" not in dist.get_backend_config(group.pg).split(","):
            return False
        refusal = host_refusal(group)
        if not refusal:
            return True
        if memory == "auto":
            _log.info("zero: memory stays private: %s", refusal)
            return False
        raise UnsupportedError(
            f"memory='shared' was asked for and is not possible: {refusal}",
            code="zero-memory",
            fix="Leave memory at 'auto', or shard over ranks of one host.",
        )

    def _nodes(self, shards: Group, shared: bool) -> NodeTopology | None:
        nodes = self.options.nodes
        if nodes is not None and shared:
            _log.info(
                "zero: the ranks share one copy of the parameters in memory: nodes of %d change nothing", nodes.size
            )
            return None
        if nodes is not None and self._dense_shards is not None and self._dense_shards.ranks != shards.ranks:
            nodes = _near(nodes, self._dense, shards)
        if nodes is None:
            return None
        if nodes.size >= shards.size or nodes.size == 1:
            _log.info("zero: %d ranks in nodes of %d: gathers need no second level", shards.size, nodes.size)
            return None
        return nodes

    def _route(self, shards: Group, nodes: NodeTopology) -> HierarchicalGather:
        inside, across = node_groups(shards, nodes.size, ("node", "across"), urgent=True)
        self._created_groups += inside, across
        return HierarchicalGather(inside, across, self.pool)

    @property
    def ranks(self) -> dict[str, ShardGroupInfo]:
        """What planning is to know of each family."""
        device = torch.device("cpu" if self._host else "meta")
        on_host = self._host and not streams.is_device_memory(torch.empty(0, device="cpu"))
        return {
            name: ShardGroupInfo(
                group_set.shard_group.size,
                group_set.shared,
                sends_from_anywhere(group_set.shard_group, device),
                group_set.nodes,
                on_host,
                group_set.size == 1,
            )
            for name, group_set in self.group_sets.items()
        }

    def share(self, units: Sequence[UnitPlan]) -> None:
        """Get the memory that hosts share for `units`. Collective over each family's shards."""
        for alike in self._alike.values():
            group_set = self.group_sets[alike[0]]
            local_units = {number: unit for number, unit in enumerate(units) if unit.spec.family in alike}
            if not group_set.shared or not local_units:
                continue
            widths = [
                unit.layout.numel * max(unit.dtypes.reduce.itemsize, unit.dtypes.accumulate.itemsize)
                for unit in local_units.values()
                if unit.spec.trained
            ]
            fulls = {number: (unit.layout.numel, unit.dtypes.param) for number, unit in local_units.items()}
            host = ShmUnitMemory(group_set.shard_group, fulls, max(widths, default=0))
            self.hosts.append(host)
            for name in alike:
                self.group_sets[name] = replace(self.group_sets[name], host=host)

    def drop(self) -> None:
        """Destroy the groups that were made. Collective."""
        while self._created_groups:
            destroy_group(self._created_groups.pop())


def _near(nodes: NodeTopology, dense: Group, shards: Group) -> NodeTopology | None:
    """Return the node topology of a reduction group on some of the ranks.

    None unless every node has the same number of the ranks, side by side.
    """
    places = [dense.ranks.index(rank) // nodes.size for rank in shards.ranks if rank in dense.ranks]
    size = places.count(places[0]) if places else 0
    if (
        len(places) != shards.size
        or size < 2
        or places != sorted(places)
        or any(places.count(p) != size for p in places)
    ):
        return None
    return replace(nodes, size=size)


def sends_from_anywhere(group: Group, device: torch.device) -> bool:
    """Whether messages between these ranks leave from and arrive in any memory at no cost: gloo's on the CPU."""
    if group.size == 1 or group.link is None or device.type != "cpu":
        return False
    return asked_backends(group.link).get("cpu") == "gloo"


def node_groups(shards: Group, size: int, names: tuple[str, str], *, urgent: bool = False) -> tuple[Group, Group]:
    """Build the group of this rank's node, and the group of ranks at its position in every node.

    Collective over `shard_group`.

    Raises:
        PlanError: the size does not divide the ranks ("zero-nodes").
    """
    if size < 1 or shards.size % size:
        raise PlanError(
            f"{shards.size} ranks that share the sharded state are not in nodes of {size}",
            code="zero-nodes",
            fix=f"Use a divisor of {shards.size} above 1, or leave it out.",
        )
    return groups.node_groups(shards, size, names, urgent=urgent)
