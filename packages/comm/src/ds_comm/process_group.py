"""Start and end communication: from what the launcher says (`launch.read_launch`) to torch's default process group.

A process that no launcher started is a world of one: nothing is made, every group has one rank, every collective runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_accel import get_accelerator
from ds_comm.backend import choose_backend, settle
from ds_comm.backend_options import BackendOptions, group_options, use_backend_options
from ds_comm.groups import DEFAULT_TIMEOUT, Group, use_timeout, world_group
from ds_comm.launch import LaunchedProcess, read_launch
from ds_comm.rehearsal.staging import is_rehearsal
from ds_comm.shm.shm_group import available
from ds_comm.store_rendezvous import rendezvous
from ds_comm.watch.recorder import deadline_from, start_recorder, stop_recorder
from ds_comm.watch.watchdog import WatchSettings
from ds_config.errors import CommError, set_place
from ds_ops.shm_collectives import SharedSegment, pid_namespace_id

__all__ = ["DEFAULT_TIMEOUT", "destroy_process_group", "ensure_world", "init_distributed", "local_rank"]

_log = logging.getLogger(__name__)
# Where a watchdog ends hangs, a backend's own limit would only end ranks whose patience is longer.
_WATCHED_TIMEOUT = timedelta(days=7)
_PROBE_BYTES = 4096
_LEAST_MEETING_S = (
    20.0  # processes that start together do not come together: each imports torch first, on a busy host slowly
)
_told: list[str] = []  # environment variables that this module set


def init_distributed(
    backend: str | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    deadline_s: float | None = None,
    options: BackendOptions | None = None,
) -> Group:
    """Make the default process group, once, and watch over it; later calls return the same world.

    A process group that was made by others is used, and watched, too.

    The ranks come from torchrun, Kubernetes, Slurm, OpenMPI, MPICH, Intel MPI, PALS, AzureML or SageMaker (`ds_comm.launch`). Variables
    that torch's own functions read (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set where they are not.

    Args:
        backend: torch's name (`"nccl"`, `"gloo"`, `"cpu:gloo,cuda:nccl"`). By default what DS_COMM_BACKEND says, else the
            device's own; for the CPU `"shm"` where all ranks are on one host and can share memory (`ds_comm.shm.shm_group`), and
            `"gloo"` where they cannot (rank 0 logs why).
        timeout: How long ranks wait for each other to come here, and for a collective where nobody watches (`deadline_s=0`). Who
            has not come is logged every 30 s.
        deadline_s: How long a rank may be blocked in one operation before all ranks say what they do and end
            (`ds_comm.watch.watchdog`); default DS_COMM_DEADLINE_S, or 60 s between CPUs and `timeout` between devices, with a
            warning after 60 s; 0 turns recording and watching off. One that is given bounds the wait for the ranks to come, too
            (at least 20 s).
        options: Of gloo or NCCL, for the world and all groups made by ds_comm.
    Returns:
        The world; a group of one, without a process group, when no launcher started this process.
    Raises:
        CommError: a variable is missing or wrong ("comm-env"); the others did not come ("comm-rendezvous"); options that the backend does
            not have, or that come after the world was made ("comm-options").
    """
    if options is not None and (dist.is_initialized() or is_rehearsal()):
        raise CommError(
            "options for a process group that is there already",
            code="comm-options",
            fix="Pass them to the first init_distributed, or to torch's init_process_group as pg_options.",
        )
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is None:
            return world_group()
        if is_rehearsal():  # nobody to meet, and nobody whose silence could be watched
            dist.init_process_group()
            return world_group()
        store, variables = rendezvous(launch, _rendezvous_s(deadline_s, timeout))
        _tell_torch({**variables, **launch.environment()})
        _choose_device(launch)
        watched = _watch_settings(deadline_s, timeout).deadline_s > 0
        limit = _WATCHED_TIMEOUT if watched else timeout
        use_timeout(limit)
        name = _backend(backend, launch, store)
        use_backend_options(options, name)
        dist.init_process_group(
            name,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=limit,
            pg_options=group_options(name, limit),
            device_id=_own_device(),
        )
    world = world_group()
    if world.size > 1 and not is_rehearsal():
        start_recorder(_watch_settings(deadline_s, timeout))
        set_place(f"rank {world.rank}/{world.size}")
    return world


def ensure_world() -> Group:
    """Return the world of this process, with a process group if a launcher started several: `init_distributed()`, unless there is one.

    For functions that are given no group. Without it, each of the processes would be a world of one and train a model of its own, which
    nobody notices. torch's `init_device_mesh` does the same. Collective if it makes the group. A group that others made stays as it is, and
    is watched if DS_COMM_DEADLINE_S is set; one process alone needs none.

    Raises:
        CommError: as `init_distributed`.
    """
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is not None and launch.world_size > 1:
            return init_distributed()
    world = world_group()
    if os.environ.get("DS_COMM_DEADLINE_S") and world.size > 1 and not is_rehearsal():
        start_recorder(_watch_settings(None, DEFAULT_TIMEOUT))
    return world


def destroy_process_group() -> None:
    """End communication: all process groups are destroyed. Does nothing in a world of one."""
    set_place("")
    use_timeout(None)
    use_backend_options(None, "")
    stop_recorder("ended communication")
    if dist.is_initialized():
        dist.destroy_process_group()
    while _told:  # a later init_distributed reads what the launcher set, not what this one did
        os.environ.pop(_told.pop(), None)


def local_rank() -> int:
    """Index of this process among those of its host; 0 without a launcher."""
    launch = read_launch(os.environ)
    return 0 if launch is None else launch.local_rank


def _watch_settings(deadline_s: float | None, timeout: timedelta) -> WatchSettings:
    variable = os.environ.get("DS_COMM_DEADLINE_S")
    if deadline_s is None:
        # A device runs long after its host: for longer nobody can tell what hangs from what only computes.
        on_device = get_accelerator().name != "cpu" and not variable
        deadline_s = timeout.total_seconds() if on_device else deadline_from(variable)
    dump_dir = os.environ.get("DS_COMM_DUMP_DIR")
    settings = WatchSettings(deadline_s, local_size=int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return settings if dump_dir is None else replace(settings, dump_dir=Path(dump_dir))


def _rendezvous_s(deadline_s: float | None, timeout: timedelta) -> float:
    """Return how long, in seconds, ranks wait for each other at startup.

    A default deadline does not limit slow starts: only an explicit deadline shortens `timeout`.
    """
    variable = os.environ.get("DS_COMM_DEADLINE_S")
    deadline = deadline_s if deadline_s is not None else deadline_from(variable) if variable else 0.0
    limit = timeout.total_seconds()
    return min(limit, max(deadline, _LEAST_MEETING_S)) if deadline > 0 else limit


def _tell_torch(variables: Mapping[str, str]) -> None:
    """Set the variables that torch's own functions read, where the launcher did not."""
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            _told.append(name)


def _choose_device(launch: LaunchedProcess) -> None:
    """Select the device of this rank by local rank, or the one device that the launcher shows to it."""
    accelerator = get_accelerator()
    if accelerator.name != "cpu":
        accelerator.set_device(device_index(launch.local_rank, accelerator.device_count()))


def device_index(local_rank: int, count: int) -> int:
    """Return which of the `count` devices that this process sees is its own. Pure.

    Slurm (`--gpus-per-task`), Ray and Kubernetes show each rank one device, whose index is 0 whatever the rank's number on its host.
    Raises:
        CommError: the host has more ranks than devices, and several of these ("comm-device-index").
    """
    if local_rank < count or count < 1:
        return local_rank
    if count == 1:
        return 0
    raise CommError(
        f"local rank {local_rank} of this host sees {count} devices",
        code="comm-device-index",
        fix=f"Start at most {count} ranks a host, or show each rank one device of its own.",
    )


def _own_device() -> torch.device | None:
    """Return the device to bind to the process group, from which torch splits communicators; None on the CPU."""
    accelerator = get_accelerator()
    return None if accelerator.name == "cpu" else accelerator.device(accelerator.current_index())


def _backend(requested: str | None, launch: LaunchedProcess, store: dist.Store) -> str:
    accelerator = get_accelerator()
    choice = choose_backend(requested, os.environ, launch, (accelerator.device().type, accelerator.comm_backend))
    if not choice.otherwise:
        return choice.name
    final = settle(choice, _refusals(launch, store))
    if final.name != choice.name and launch.rank == 0:
        _log.warning("CPU ranks communicate over %s, which is slower: %s", final.name, final.why)
    return final.name


def _refusals(launch: LaunchedProcess, store: dist.Store) -> list[str]:
    """Return why each rank cannot share memory with the other ranks, by attaching memory of rank 0.

    All ranks get the same list.
    """
    here, why = pid_namespace_id(), available()
    probe = SharedSegment(_PROBE_BYTES) if launch.rank == 0 and not why else None
    if launch.rank == 0:
        store.set("share/0", f"{here}|{probe.token if probe else ''}|{why}")
    else:
        there, token, refused = store.get("share/0").decode().split("|", 2)
        if not why and not refused:
            why = _cannot_attach(token) if here == there else "on another host or in another PID namespace than rank 0"
        store.set(f"share/{launch.rank}", f"||{why}")
    reasons = [store.get(f"share/{rank}").decode().split("|", 2)[2] for rank in range(launch.world_size)]
    if probe is not None:  # everyone has tried it
        probe.close()
    return reasons


def _cannot_attach(token: str) -> str:
    try:
        SharedSegment.attach(token, _PROBE_BYTES).close()
    except CommError as error:
        return str(error).splitlines()[0]
    return ""
