"""Names of torch that moved between the versions we support, and the private ones we need. No other file has any."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_comm.backend_options import group_options

__all__ = [
    "ALL_GATHER_SINGLE",
    "REDUCE_SCATTER_SINGLE",
    "backend_names",
    "default_name",
    "flight_records",
    "group_ranks",
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


def default_name() -> str:
    """Return torch's name of the default process group; empty without one."""
    world = dist.group.WORLD
    return "" if world is None else str(world.group_name)


def flight_records(active: bool) -> list[str]:
    """Return what the flight recorders of torch's backends hold, as JSON; `active`: only calls that have not ended. Empty where this torch has none."""
    module: Any = torch._C._distributed_c10d
    readers = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [read(includeCollectives=True, onlyActive=active) for read in readers if read is not None]


def group_ranks() -> dict[str, tuple[int, ...]]:
    """Return the world ranks of every process group of this process by torch's name."""
    groups = list(c10d._world.pg_names.items())
    return {str(name): tuple(dist.get_process_group_ranks(pg)) for pg, name in groups}


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
    ranks: Sequence[int],
    name: str,
    purpose: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    urgent: bool = False,
) -> dist.ProcessGroup:
    """Create a process group of `ranks` under `name`, called by its members only.

    `timeout`: torch's default when None. `urgent`: on a stream of high priority, where the backend has such.

    torch names such a group after its ranks and the number of groups that this process has: two members with different
    numbers of groups wait for each other for ever, and a repeated name finds the addresses of the earlier group.
    """
    world: Any = dist.group.WORLD
    default, store = c10d._world.pg_map[world]
    kind = dist.Backend(backend or default)
    options: Any = {"timeout": timeout or c10d._get_default_timeout(kind), "group_desc": purpose}
    extra = group_options(str(kind), options["timeout"], urgent=urgent)
    if extra is not None:
        options["backend_options"] = extra
    members: Any = list(ranks)
    group_name: Any = name
    # With a bound device torch splits the world's communicator, which waits for every rank of the world: this one is of its own.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        pg, _ = c10d._new_process_group_helper(
            len(members), members.index(world.rank()), members, kind, store, group_name, **options
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[pg] = {rank: place for place, rank in enumerate(members)}
    group: dist.ProcessGroup = pg
    return group
