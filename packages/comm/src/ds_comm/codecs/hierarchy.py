"""A group seen as nodes of ranks: what is fast inside a node is done there first.

Words: `local` ranks share a *node*; a rank is number `index` of node `node`, and rank = node * local + index. The group
`inside` has the ranks of this node, `across` those with this index in every node. For CPU ranks of several hosts, `inside`
can be `shm` while `across` is gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_comm.collectives import ReduceOp, all_gather_single, all_reduce, reduce_scatter_single
from ds_comm.groups import Group, GroupLike, as_group, new_group
from ds_comm.metadata import all_gather_json
from ds_config.errors import CommError

__all__ = ["Hierarchy"]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Two levels of one group."""

    group: Group
    inside: Group
    across: Group

    def __post_init__(self) -> None:
        local, nodes = self.inside.size, self.across.size
        node, index = divmod(self.group.rank, local)
        if (local * nodes, self.inside.rank, self.across.rank) != (self.group.size, index, node):
            raise _refuse(self.group, f"{nodes} nodes of {local} in the order of ranks")

    @classmethod
    def split(cls, group: GroupLike, local: int, *, inside_backend: str | None = None) -> Hierarchy:
        """Split `group` into nodes of `local` consecutive ranks.

        Collective over the world, each rank with its group.

        Args:
            inside_backend: torch's name of the backend inside nodes, for example `"shm"`; default that of the world.
        Raises:
            CommError: `local` does not divide the group ("comm-hierarchy").
        """
        group = as_group(group)
        if local < 1 or group.size % local:
            raise _refuse(group, f"nodes of {local}")
        rank_lists = map(tuple, all_gather_json(group.ranks, None, unit="hierarchy"))
        inside = across = None
        for ranks in sorted(set(rank_lists)):
            nodes = [ranks[at : at + local] for at in range(0, len(ranks), local)]
            for members in nodes:
                inside = new_group(members, f"{group.name}.inside", inside_backend) or inside
            for members in zip(*nodes, strict=True):
                across = new_group(members, f"{group.name}.across") or across
        if inside is None or across is None:
            raise _refuse(group, "this rank in it")
        return cls(group, inside, across)

    @property
    def nodes(self) -> int:
        return self.across.size

    @property
    def local(self) -> int:
        return self.inside.size

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM, *, unit: str = "") -> None:
        """Reduce `tensor` over all ranks in three phases, of which only the middle phase crosses nodes.

        Sums are computed inside nodes first, then over nodes: rounding differs from `ds_comm.all_reduce`, but every
        rank
        has the same bits.
        Cost: (N-1)/N of the bytes of 1/local of the tensor twice across nodes, the tensor twice inside.
        """
        flat = tensor.view(-1)
        padding = -flat.numel() % self.local
        whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
        part = whole[self.inside.rank * (n := whole.numel() // self.local) :][:n]
        averaged = op == ReduceOp.AVG
        inner = ReduceOp.SUM if averaged else op
        reduce_scatter_single(part, whole, inner, self.inside, unit=unit)
        all_reduce(part, inner, self.across, unit=unit)
        if averaged:
            part.div_(self.group.size)
        all_gather_single(whole, part, self.inside, unit=unit)
        if padding:
            flat.copy_(whole[: flat.numel()])


def _refuse(group: Group, what: str) -> CommError:
    return CommError(
        f"group {group.name!r} of {group.size} ranks (this is rank {group.rank} of it) has not {what}",
        code="comm-hierarchy",
        fix="Use nodes of equally many consecutive ranks.",
    )
