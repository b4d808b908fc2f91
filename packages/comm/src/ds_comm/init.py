"""Start and end communication: from what the launcher says (`launch.read_launch`) to torch's default process group.

A process that no launcher started is a world of one: nothing is made, every group has one rank, every collective runs.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_accel import get_accelerator
from ds_comm.backend import choose_backend, settle
from ds_comm.groups import DEFAULT_TIMEOUT, Group, use_timeout, world_group
from ds_comm.launch import Launch, read_launch
from ds_comm.shm import available
from ds_comm.watch.recorder import deadline_from, start_recorder, stop_recorder
from ds_comm.watch.secret import SECRET_VARIABLE, new_secret
from ds_comm.watch.watchdog import WatchSettings
from ds_config.errors import CommError, set_place
from ds_ops.shm import Segment, neighbourhood

__all__ = ["DEFAULT_TIMEOUT", "destroy_process_group", "init_distributed", "local_rank"]

_log = logging.getLogger(__name__)
# Where a watchdog ends hangs, a backend's own limit would only end ranks whose patience is longer.
_WATCHED_TIMEOUT = timedelta(days=7)
_PROBE_BYTES = 4096
_POLL_S = 0.02
_REFUSED_S = 0.005
_FINE_S = 5.0  # after this torch's own pauses are no longer what one waits for
_NOTE = re.compile(r"([1-9][0-9]{0,8}) ([0-9]{1,5}) ([!-~]+)")  # pid, port, secret
_NOTE_BYTES = 4096
_told: list[str] = []  # environment variables that this module set


def init_distributed(
    backend: str | None = None, *, timeout: timedelta = DEFAULT_TIMEOUT, deadline_s: float | None = None
) -> Group:
    """Make the default process group, once, and watch over it; later calls return the same world.

    A process group that was made by others is used, and watched, too.

    The ranks come from torchrun, Slurm, OpenMPI, MPICH, Intel MPI, PALS, AzureML or SageMaker (`ds_comm.launch`). Variables
    that torch's own functions read (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set where they are not.

    Args:
        backend: torch's name (`"nccl"`, `"gloo"`, `"cpu:gloo,cuda:nccl"`). By default what DS_COMM_BACKEND says, else the
            device's own; for the CPU `"shm"` where all ranks are on one host and can share memory (`ds_comm.shm`), and
            `"gloo"` where they cannot (rank 0 logs why).
        timeout: How long the rendezvous may take, and a collective where nobody watches (`deadline_s=0`).
        deadline_s: How long a rank may be blocked in one operation before all ranks say what they do and end
            (`ds_comm.watch.watchdog`); default DS_COMM_DEADLINE_S, or 60 s between CPUs and `timeout` between devices, with a
            warning after 60 s; 0 turns recording and watching off.
    Returns:
        The world; a group of one, without a process group, when no launcher started this process.
    Raises:
        CommError: a variable is missing or wrong ("comm-env"); the others did not come ("comm-rendezvous").
    """
    if not dist.is_initialized():
        launch = read_launch(os.environ)
        if launch is None:
            return world_group()
        store = _own_keys(_meet(launch, timeout), launch.rank)
        _tell_torch(launch.environment())
        _choose_device(launch)
        watched = _watch_settings(deadline_s, timeout).deadline_s > 0
        use_timeout(_WATCHED_TIMEOUT if watched else timeout)
        dist.init_process_group(
            _backend(backend, launch, store),
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_WATCHED_TIMEOUT if watched else timeout,
            device_id=_own_device(),
        )
    world = world_group()
    if world.size > 1:
        start_recorder(_watch_settings(deadline_s, timeout))
        set_place(f"rank {world.rank}/{world.size}")
    return world


def destroy_process_group() -> None:
    """End communication: all process groups are destroyed. Does nothing in a world of one."""
    set_place("")
    use_timeout(None)
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
    told = os.environ.get("DS_COMM_DEADLINE_S")
    if deadline_s is None:
        # A device runs long after its host: what hangs and what only computes look alike for longer.
        on_device = get_accelerator().name != "cpu" and not told
        deadline_s = timeout.total_seconds() if on_device else deadline_from(told)
    dump_dir = os.environ.get("DS_COMM_DUMP_DIR")
    settings = WatchSettings(deadline_s, local_size=int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return settings if dump_dir is None else replace(settings, dump_dir=Path(dump_dir))


def _tell_torch(variables: Mapping[str, str]) -> None:
    """Set the variables that torch's own functions read, where the launcher did not."""
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            _told.append(name)


def _choose_device(launch: Launch) -> None:
    """Each rank of a host takes a device of its own, unless the launcher shows it only one."""
    accelerator = get_accelerator()
    if accelerator.name != "cpu" and launch.local_rank < accelerator.device_count():
        accelerator.set_device(launch.local_rank)


def _own_device() -> torch.device | None:
    """The device that this rank communicates from: with it torch splits groups from one communicator."""
    accelerator = get_accelerator()
    return None if accelerator.name == "cpu" else accelerator.device(accelerator.current_index())


def _own_keys(store: dist.Store, rank: int) -> dist.Store:
    """The part of a store that this initialisation uses: a launcher's store has the keys of earlier ones of this job."""
    number = store.add(f"ds_comm/times/{rank}", 1)
    return dist.PrefixStore(f"ds_comm/{number}", store)


def _backend(asked: str | None, launch: Launch, store: dist.Store) -> str:
    accelerator = get_accelerator()
    choice = choose_backend(asked, os.environ, launch, (accelerator.device().type, accelerator.comm_backend))
    if not choice.otherwise:
        return choice.name
    final = settle(choice, _refusals(launch, store))
    if final.name != choice.name and launch.rank == 0:
        _log.warning("CPU ranks communicate over %s, which is slower: %s", final.name, final.why)
    return final.name


def _refusals(launch: Launch, store: dist.Store) -> list[str]:
    """Why each rank cannot share memory with the others; all ranks get the same list. Rank 0's memory is tried."""
    here, why = neighbourhood(), available()
    probe = Segment(_PROBE_BYTES) if launch.rank == 0 and not why else None
    if launch.rank == 0:
        store.set("share/0", f"{here}|{probe.token if probe else ''}|{why}")
    else:
        there, token, refused = store.get("share/0").decode().split("|", 2)
        if not why and not refused:
            why = _cannot_attach(token) if here == there else "on another host or in another PID namespace than rank 0"
        store.set(f"share/{launch.rank}", f"||{why}")
    found = [store.get(f"share/{rank}").decode().split("|", 2)[2] for rank in range(launch.world_size)]
    if probe is not None:  # everyone has tried it
        probe.close()
    return found


def _cannot_attach(token: str) -> str:
    try:
        Segment.attach(token, _PROBE_BYTES).close()
    except CommError as error:
        return str(error).splitlines()[0]
    return ""


def _meet(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store on which all ranks of the job are."""
    address = launch.address or "127.0.0.1"
    try:
        if launch.port == 0:
            return _meet_on_free_port(launch, timeout)
        _tell_torch({"MASTER_ADDR": address, "MASTER_PORT": str(launch.port)})
        if launch.rank != 0:
            _await_server(address, launch.port, min(_FINE_S, timeout.total_seconds()))
        # torch knows when the launcher's own store is to be used and who serves it.
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    except (dist.DistError, OSError, ValueError) as error:
        raise CommError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) could not meet the others at "
            f"{address}:{launch.port} within {timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}",
            code="comm-rendezvous",
            fix="Check that all ranks were started, that rank 0's host is reachable and that no other job uses this port.",
        ) from error
    return store


def _await_server(address: str, port: int, limit_s: float) -> None:
    """Return when someone listens there, or after the limit.

    torch's client of a store that is not there yet tries again after half a second and more, which both ranks then wait; where
    ranks start together, most runs began with it (docs/benchmarks/engine.md).
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except ConnectionRefusedError:
            time.sleep(_REFUSED_S)
        except OSError:  # no such host, no route: torch's client says it better
            return
        else:
            return


def _meet_on_free_port(launch: Launch, timeout: timedelta) -> dist.Store:
    """Rank 0 takes a free port and tells the others of this host through a file that only this job knows.

    No two jobs can clash: the kernel gives each its own port, and the file is named after the job and its starter.
    """
    name = f"ds-comm-{os.getuid()}-{launch.job or 'job'}-{os.getppid()}.port"
    note = Path(tempfile.gettempdir()) / name.replace("/", "_")
    if launch.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        draft = note.with_suffix(f".{os.getpid()}")
        secret = os.environ.get(SECRET_VARIABLE) or new_secret()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
            file.write(f"{os.getpid()} {store.port} {secret}")
        draft.replace(note)  # others see all of it or nothing
        store.wait([f"here/{rank}" for rank in range(1, launch.world_size)], timeout)
        note.unlink()
    else:
        port, secret = _read_note(note, timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        store.set(f"here/{launch.rank}", "")
    _tell_torch({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), SECRET_VARIABLE: secret})
    return store


def _read_note(note: Path, timeout: timedelta) -> tuple[int, str]:
    """The port and the job's secret. A note of another user, or one that others may read or write, is not believed."""
    deadline, strange = time.monotonic() + timeout.total_seconds(), ""
    while time.monotonic() < deadline:
        try:
            with os.fdopen(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                found = os.fstat(file.fileno())
                if found.st_uid != os.getuid() or found.st_mode & 0o077:
                    strange = f"; what is there belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}"
                    raise FileNotFoundError(note)
                fields = _NOTE.fullmatch(file.read(_NOTE_BYTES))
            if fields is None or not 0 < int(fields[2]) < 1 << 16:
                raise ValueError(note)
            os.kill(int(fields[1]), 0)  # a note may be left by a job that was killed
            return int(fields[2]), fields[3]
        except (OSError, ValueError, OverflowError):
            time.sleep(_POLL_S)
    raise TimeoutError(f"rank 0 left no note in {note}{strange}")
