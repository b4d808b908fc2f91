"""Names of torch that moved between the versions we support, and the private ones we need. No other file has any."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "ALL_GATHER_SINGLE",
    "REDUCE_SCATTER_SINGLE",
    "backend_names",
    "is_alive",
    "named_group",
    "second_connection",
    "store_of",
]

# torch 2.13 renamed both functions; the arguments did not change.
ALL_GATHER_SINGLE: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def backend_names(pg: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type that `pg` communicates: `{"cpu": "gloo", "cuda": "nccl"}`."""
    pairs = (part.partition(":") for part in dist.get_backend_config(pg).split(","))
    return {device: name for device, _, name in pairs}


def second_connection(pg: dist.ProcessGroup) -> dist.Store:
    """Open a separate connection to the store of process group `pg`, for use by another thread."""
    store: Any = store_of(pg)
    return cast(dist.Store, store.clone())


def store_of(pg: dist.ProcessGroup) -> dist.Store:
    """Return the store over which the ranks of process group `pg` met, below the prefix of the group."""
    store: Any = c10d._get_process_group_store(pg)  # get_group_store() knows the store of torch's own backends only
    return cast(dist.Store, store)


def is_alive(pg: dist.ProcessGroup) -> bool:
    """Whether `pg` has not been destroyed."""
    return pg in c10d._world.pg_map


def named_group(
    ranks: Sequence[int], name: str, purpose: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Create a process group of `ranks` under `name`, called by its members only.

    `timeout`: torch's default when None.

    torch names such a group after its ranks and the number of groups that this process has: two members with different
    numbers of groups wait for each other for ever, and a repeated name finds the addresses of the earlier group.
    """
    world: Any = dist.group.WORLD
    default, store = c10d._world.pg_map[world]
    kind = dist.Backend(backend or default)
    options: Any = {
        "timeout": timeout or c10d._get_default_timeout(kind),
        "device_id": world.bound_device_id if len(ranks) > 1 else None,  # it would split the world's communicator
        "group_desc": purpose,
    }
    members: Any = list(ranks)
    group_name: Any = name
    pg, _ = c10d._new_process_group_helper(
        len(members), members.index(world.rank()), members, kind, store, group_name, **options
    )
    c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(members)}
    group: dist.ProcessGroup = pg
    return group
