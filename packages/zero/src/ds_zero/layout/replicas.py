"""Groups of ranks that hold one copy of the model each (MiCS, hybrid sharding): shards within, sums of gradients across.

Words: a *replica* is `shard_size` neighbouring ranks that share one copy of the sharded state. Rank r of every replica holds
the same shard; those ranks are its *twins*, and sum its gradient among themselves. Reference: Zhang et al. 2022, "MiCS".
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_comm import Group, drop_group, part_group, single_group
from ds_config.errors import PlanError

__all__ = ["Replicas", "split_replicas"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Where this rank is.

    Attributes:
        shards: The ranks of its replica.
        twins: The ranks that hold the same shard.
        made: Of these, the groups that exist for this and end with `drop`.
    """

    shards: Group
    twins: Group
    made: tuple[Group, ...] = ()

    def drop(self) -> None:
        """Destroy what was made. Collective."""
        for group in self.made:
            drop_group(group)


def split_replicas(group: Group, shard_size: int | None) -> Replicas:
    """Cut the ranks of `group` into replicas of `shard_size` neighbours; None: one replica. Collective over the group.

    Raises:
        PlanError: `shard_size` does not divide the ranks ("zero-shard-size").
    """
    alone = single_group("alone", group.global_rank)
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
    number, place = divmod(group.rank, size)
    shards = part_group(group.ranks[number * size : (number + 1) * size], "replica")
    twins = part_group(group.ranks[place::size], "twins")
    return Replicas(shards, twins, (shards, twins))
