"""All ranks of a job come to one store, within a time, and who does not come is named.

Rank 0 serves the store. Ranks that cannot reach it wait for it; ranks that have reached it are counted there, and the last one to come
lets all go on: one request and one wait a rank, whatever their number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ds_comm.launch import LaunchedProcess
from ds_comm.watch.secret import SECRET_VARIABLE, new_secret
from ds_comm.watch.verdict import rank_names
from ds_config.errors import CommError

__all__ = ["rendezvous"]

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_REFUSED_S = 0.005
_FINE_S = 5.0  # so long a server that starts is polled without a pause that anybody would feel
_COARSE_S = 0.2
_NAME_S = 60.0  # after which a host name that nobody knows is wrong, not late
_WORD_S = 30.0  # between two lines of log about ranks that have not come
_READING_S = 2.0
_ALL = "all"
_NOTE = re.compile(r"([1-9][0-9]{0,8}) ([0-9]{1,5}) ([!-~]+)")  # pid, port, secret
_NOTE_BYTES = 4096


def rendezvous(launch: LaunchedProcess, limit_s: float) -> tuple[dist.Store, dict[str, str]]:
    """Return when all ranks of the job are here.

    Args:
        limit_s: How long to wait for the others, in seconds; who is missing is logged every 30 s.
    Returns:
        A store with no keys, of this rendezvous alone, and the environment variables by which torch finds it again.
    Raises:
        CommError: a rank did not come, which the message names, or the store cannot be reached ("comm-rendezvous").
    """
    end_s = time.monotonic() + limit_s
    address = launch.address or "127.0.0.1"
    note: Path | None = None
    try:
        if launch.port == 0:
            store, variables, note = _on_free_port(launch, limit_s)
        else:
            store = _at_address(address, launch, limit_s)
            variables = {"MASTER_ADDR": address, "MASTER_PORT": str(launch.port)}
        # A launcher's own store has the keys of earlier ones of this job.
        store = dist.PrefixStore(f"ds_comm/{store.add(f'ds_comm/times/{launch.rank}', 1)}", store)
        _roll_call(store, launch, end_s)
    except (dist.DistError, OSError, ValueError) as error:
        raise CommError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher}) could not reach the others at "
            f"{address}:{launch.port} in {time.monotonic() + limit_s - end_s:.0f} of {limit_s:.0f} s: {str(error).splitlines()[0]}",
            code="comm-rendezvous",
            fix="Check that all ranks were started and came as far as init_distributed, that rank 0's host is reachable and that "
            "no other job uses this port.",
        ) from error
    finally:
        if note is not None:
            note.unlink(missing_ok=True)
    return store, variables


def _roll_call(store: dist.Store, launch: LaunchedProcess, end_s: float) -> None:
    """Wait until every rank has written that it is here.

    The first rank whose time is over ends the wait of all: rank 0 would take the store with it, and with the store who is missing.

    Raises:
        TimeoutError: some have not; they are named.
    """
    store.set(f"here/{launch.rank}", "")
    if store.add("arrived", 1) == launch.world_size:
        store.compare_set("end", "", _ALL)
    began_s = time.monotonic()
    word_s = began_s + _WORD_S
    while True:
        with contextlib.suppress(dist.DistStoreError):  # not all are here yet
            store.wait(["end"], timedelta(seconds=max(0.001, min(end_s, word_s) - time.monotonic())))
            break
        here = [rank for rank in range(launch.world_size) if store.check([f"here/{rank}"])]
        missing = rank_names(sorted(set(range(launch.world_size)) - set(here))) if len(here) < launch.world_size else ""
        now = time.monotonic()
        if now >= end_s and missing:
            store.compare_set("end", "", missing)
        elif now >= word_s:
            word_s += _WORD_S
            if missing and launch.rank == here[0]:
                waited = f"{now - began_s:.0f} s for {missing}, which did not come to init_distributed yet"
                _log.warning("rank %d waits %s; it waits at most %.0f s more", launch.rank, waited, end_s - now)
    if (outcome := store.get("end").decode()) != _ALL:
        _until_read(store, launch)
        raise TimeoutError(f"{outcome} did not come")


def _until_read(store: dist.Store, launch: LaunchedProcess) -> None:
    """Rank 0 stays until everybody else knows why."""
    read = store.add("read", 1)
    until_s = time.monotonic() + _READING_S
    while launch.rank == 0 and read < store.add("arrived", 0) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        read = store.add("read", 0)


# -- at an address that the launcher said


def _at_address(address: str, launch: LaunchedProcess, limit_s: float) -> dist.Store:
    limit = timedelta(seconds=limit_s)
    _await_name(address, limit_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torch's agent serves, and torch knows how
        return next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=limit))[0]
    serves = launch.rank == 0
    if not serves:
        _await_server(address, launch.port, limit_s)
    return dist.TCPStore(
        address, launch.port, launch.world_size, serves, limit, wait_for_workers=False, multi_tenant=True
    )


def _await_name(address: str, limit_s: float) -> None:
    """Return when this host knows the address of rank 0. A pod's name may come later than the pods that look for it.

    Raises:
        TimeoutError: the name stayed unknown.
    """
    began_s = time.monotonic()
    word_s = began_s + 1.0
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now >= began_s + min(limit_s, _NAME_S):
                raise TimeoutError(f"this host knows no host {address[:200]!r} ({error})") from error
            if now >= word_s:
                word_s = now + _WORD_S
                _log.warning("this host knows no host %r yet (MASTER_ADDR): %s", address, error)
            time.sleep(_COARSE_S)


def _await_server(address: str, port: int, limit_s: float) -> None:
    """Return when someone listens there, or where only torch's client can say what is wrong.

    torch's client of a store that is not there yet tries again after half a second and more, which both ranks then wait; where
    ranks start together, most runs began with it (docs/benchmarks/engine.md).

    Raises:
        TimeoutError: nobody listened there in time.
    """
    began_s = time.monotonic()
    word_s = began_s + _WORD_S
    while (now := time.monotonic()) < began_s + limit_s:
        if now >= word_s:
            word_s += _WORD_S
            _log.warning("rank 0 does not listen at %s:%d yet, after %.0f s", address, port, now - began_s)
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except ConnectionRefusedError:
            time.sleep(_REFUSED_S if now < began_s + _FINE_S else _COARSE_S)
        except OSError:  # no such host, no route: torch's client says it better
            return
        else:
            return
    raise TimeoutError("rank 0 did not come: nobody listens there")


# -- on one host, where the launcher said no port


def _on_free_port(launch: LaunchedProcess, limit_s: float) -> tuple[dist.Store, dict[str, str], Path | None]:
    """Rank 0 takes a free port and tells the others of this host through a file that only this job knows.

    No two jobs can clash: the kernel gives each its own port, and the file is named after the job and its starter.

    Returns:
        The store, the variables that say where it is, and on rank 0 the file, which nobody needs when all have come.
    """
    name = f"ds-comm-{os.getuid()}-{launch.job or 'job'}-{os.getppid()}.port"
    note = Path(tempfile.gettempdir()) / name.replace("/", "_")
    limit = timedelta(seconds=limit_s)
    if launch.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        draft = note.with_suffix(f".{os.getpid()}")
        secret = os.environ.get(SECRET_VARIABLE) or new_secret()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
            file.write(f"{os.getpid()} {store.port} {secret}")
        draft.replace(note)  # others see all of it or nothing
    else:
        port, secret = _read_note(note, limit_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), SECRET_VARIABLE: secret}
    return store, variables, note if launch.rank == 0 else None


def _read_note(note: Path, limit_s: float) -> tuple[int, str]:
    """Read the port and the job's secret from rank 0's note, waiting up to `limit_s` for a valid note.

    A note of another user, or with access for other users, is ignored.
    """
    deadline, strange = time.monotonic() + limit_s, ""
    while time.monotonic() < deadline:
        try:
            with os.fdopen(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & 0o077:
                    strange = f"; what is there belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}"
                    raise FileNotFoundError(note)
                fields = _NOTE.fullmatch(file.read(_NOTE_BYTES))
            if fields is None or not 0 < int(fields[2]) < 1 << 16:
                raise ValueError(note)
            os.kill(int(fields[1]), 0)  # a note may be left by a job that was killed
            return int(fields[2]), fields[3]
        except (OSError, ValueError, OverflowError):
            time.sleep(_POLL_S)
    raise TimeoutError(f"rank 0 did not come: it left no note in {note}{strange}")
