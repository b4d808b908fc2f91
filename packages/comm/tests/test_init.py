"""Meeting on a free port: many jobs at once on one host, and what others left behind."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import process_group, store_rendezvous
from ds_comm.launch import LaunchedProcess
from ds_config.errors import CommError

PAIR = LaunchedProcess("OpenMPI", 0, 2, 0, 2, "", 0, "job")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def joined(launch: LaunchedProcess, timeout_s: float = 30) -> dist.Store:
    return store_rendezvous.rendezvous(launch, timeout_s)[0]


def test_twenty_jobs_at_once_do_not_clash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch asks a name server who 127.0.0.1 is, for a log line: under a burst of questions that takes 5 s.
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")
    stores: dict[tuple[str, int], dist.Store] = {}

    def rank(job: str, index: int) -> None:
        stores[job, index] = joined(replace(PAIR, job=job, rank=index))

    threads = [threading.Thread(target=rank, args=(f"job{n}", index)) for n in range(20) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stores) == 40
    for n in range(20):
        stores[f"job{n}", 0].set("who", f"job{n}")
    for n in range(20):
        assert stores[f"job{n}", 1].get("who") == f"job{n}".encode()
    assert list(folder.iterdir()) == [], "no note is left"


def test_the_note_of_a_killed_job_is_not_followed(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    note = folder / f"ds-comm-{os.getuid()}-job-{os.getppid()}.port"
    note.write_text(f"{dead.pid} 1 secret")
    note.chmod(0o600)
    with pytest.raises(CommError, match="left no note") as caught:
        joined(replace(PAIR, rank=1), timeout_s=0.2)
    assert caught.value.code == "comm-rendezvous"


def test_a_note_that_others_may_write_is_not_believed(folder: Path) -> None:
    note = folder / f"ds-comm-{os.getuid()}-job-{os.getppid()}.port"
    note.write_text(f"{os.getpid()} 1 secret")
    note.chmod(0o666)
    with pytest.raises(CommError, match=r"what is there belongs to user .* with mode 666"):
        joined(replace(PAIR, rank=1), timeout_s=0.2)
    note.unlink()
    (folder / "elsewhere").write_text(f"{os.getpid()} 1 secret")
    (folder / "elsewhere").chmod(0o600)
    note.symlink_to(folder / "elsewhere")
    with pytest.raises(CommError, match="left no note"):
        joined(replace(PAIR, rank=1), timeout_s=0.2)


def test_a_drawn_note_ends_in_an_error_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in it: typed errors, within the time given, and no connection to a port that nobody named."""
    monkeypatch.setattr(store_rendezvous.time, "sleep", lambda seconds: None)
    rng = random.Random(0)
    note = folder / "note"
    note.touch(mode=0o600)
    numbers = [b"-1", b"0", b"x", b"", b"65536", b"9" * 30, b"1e3", b"0x50", "\u0663".encode(), b"2147483648", b"+5"]
    good = [str(os.getpid()).encode(), b"4242", b"0" * 32]

    def text() -> bytes:
        drawn = rng.random()
        if drawn < 0.3:
            return rng.randbytes(rng.randrange(40))
        fields = list(good)
        if drawn < 0.8:
            place = rng.randrange(2)
            fields[place] = rng.choice([n for n in numbers if place == 1 or n != b"65536"])  # that may be a process
        else:
            fields = rng.choices(fields, k=rng.choice([0, 1, 4, 5]))
        return b" ".join(fields) + rng.choice([b"", b"\n", b" ", b"\0", b" more"])

    for _ in range(5000):
        note.write_bytes(text())
        with pytest.raises(TimeoutError, match="left no note"):
            store_rendezvous._read_note(note, 50e-6)
    note.write_bytes(b" ".join(good))
    assert store_rendezvous._read_note(note, 1.0) == (4242, "0" * 32)


def test_the_job_secret_is_made_for_its_ranks_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    replaced = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: [modes.append(self.stat().st_mode & 0o777), replaced(self, to)][1]
    )
    told: list[tuple[dist.Store, dict[str, str]]] = []

    def one(rank: int) -> None:
        told.append(store_rendezvous.rendezvous(replace(PAIR, job="secret", rank=rank), 30))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert modes == [0o600]
    assert told[0][1]["DS_JOB_SECRET"] == told[1][1]["DS_JOB_SECRET"]
    assert len(told[0][1]["DS_JOB_SECRET"]) == 32


def test_ranks_that_do_not_come_are_told() -> None:
    with pytest.raises(CommError, match=r"rank 0 of 2 .* could not reach the others .*: rank 1 did not come") as caught:
        joined(PAIR, timeout_s=0.2)
    assert "all ranks were started" in caught.value.fix
    six = replace(PAIR, world_size=6, local_size=6)
    other = threading.Thread(target=ended, args=(replace(six, rank=4), 5.0))
    other.start()
    with pytest.raises(CommError, match=r"ranks 1, 2, 3, 5 did not come"):
        joined(six, timeout_s=1.0)
    other.join()


def ended(launch: LaunchedProcess, timeout_s: float) -> None:
    with contextlib.suppress(CommError):
        joined(launch, timeout_s)


def test_who_is_waited_for_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store_rendezvous, "_WORD_S", 0.05)
    with pytest.raises(CommError):
        joined(PAIR, timeout_s=0.2)
    assert "for rank 1, which did not come to init_distributed yet" in caplog.text
    caplog.clear()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(CommError, match="rank 0 did not come: nobody listens there"):
        joined(replace(PAIR, rank=1, port=port, address="127.0.0.1"), timeout_s=0.2)
    assert f"rank 0 does not listen at 127.0.0.1:{port} yet" in caplog.text


@pytest.mark.parametrize("deadline", [None, "30", "3"])
def test_a_deadline_that_was_given_bounds_the_rendezvous(monkeypatch: pytest.MonkeyPatch, deadline: str | None) -> None:
    monkeypatch.delenv("DS_COMM_DEADLINE_S", raising=False)
    if deadline is not None:
        monkeypatch.setenv("DS_COMM_DEADLINE_S", deadline)
    expected = {None: 600, "30": 30, "3": 20}[deadline]
    assert process_group._rendezvous_s(None, timedelta(minutes=10)) == expected
    assert process_group._rendezvous_s(None, timedelta(seconds=5)) == 5
    assert process_group._rendezvous_s(0, timedelta(minutes=10)) == 600, "nobody watches"
    assert process_group._rendezvous_s(25, timedelta(minutes=10)) == 25


def test_two_ranks_of_an_mpi_launcher(forked: Callable[..., list[Any]], tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch, ds_comm\n"
        "for _ in range(2):\n"
        "    world = ds_comm.init_distributed('gloo')\n"
        "    assert ds_comm.init_distributed().size == 2\n"
        "    x = torch.ones(3) * (world.rank + 1)\n"
        "    ds_comm.all_reduce(x)\n"
        "    assert x.tolist() == [3, 3, 3]\n"
        "    assert os.environ['RANK'] == str(world.rank) and ds_comm.local_rank() == world.rank\n"
        "    ds_comm.destroy_process_group()\n"
        "    assert 'RANK' not in os.environ and 'MASTER_PORT' not in os.environ\n"
        "print('fine')\n"
    )
    env = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "TMPDIR": str(tmp_path)}
    ranks = forked([([str(script)], env | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}) for rank in range(2)])
    assert [rank.output for rank in ranks] == ["fine\n", "fine\n"]


def test_one_of_several_processes_is_no_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum before `init_distributed` was each rank's own value, with no word."""
    if dist.is_initialized():  # by a test of another package in this process
        ds_comm.destroy_process_group()
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for call in (lambda: ds_comm.all_reduce(torch.ones(2)), ds_comm.barrier, lambda: ds_comm.as_group(None)):
        with pytest.raises(CommError, match="this is rank 1 of 2 by torchrun, and it is in no process group") as caught:
            call()
        assert caught.value.code == "comm-world"
    ds_comm.all_reduce(torch.ones(2), group=ds_comm.self_group())


def test_without_a_launcher_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if dist.is_initialized():  # by a test of another package in this process
        ds_comm.destroy_process_group()
    assert ds_comm.init_distributed().size == 1
    assert ds_comm.ensure_world().size == 1
    assert not dist.is_initialized()
    assert ds_comm.local_rank() == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ds_comm.ensure_world().size == 1
    assert not dist.is_initialized(), "one process needs none"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CommError, match="LOCAL_RANK is not set"):
        ds_comm.ensure_world()
    ds_comm.destroy_process_group()
