"""init_distributed on ranks of a pool: made by it, or found."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import process_group
from ds_comm.shm import shm_group
from ds_comm.watch.recorder import current
from ds_testing import world

WATCHDOG = "ds-comm-watchdog"


def watchdogs() -> int:
    return sum(thread.name == WATCHDOG for thread in threading.enumerate())


@world(2, backend=None)
def test_what_the_launcher_says_is_used() -> None:
    group = ds_comm.init_distributed("gloo")
    assert (group.size, group.ranks) == (2, (0, 1))
    assert watchdogs() == 1
    assert ds_comm.init_distributed().order is group.order
    assert watchdogs() == 1
    x = torch.ones(2)
    ds_comm.all_reduce(x, unit="first")
    assert x.tolist() == [2, 2]
    ds_comm.destroy_process_group()
    assert not dist.is_initialized()
    assert watchdogs() == 0
    assert not current().watching()


@world(2, backend=None)
def test_the_world_is_made_where_a_launcher_started_several() -> None:
    assert ds_comm.world_group().size == 1
    group = ds_comm.ensure_world()
    assert (group.size, group.ranks) == (2, (0, 1))
    assert current().watching()
    assert ds_comm.ensure_world().order is group.order
    ds_comm.barrier()
    ds_comm.destroy_process_group()


@world(2)
def test_the_world_of_others_stays_as_it_is() -> None:
    assert ds_comm.ensure_world().size == 2
    assert not current().watching()


@world(2)
def test_a_process_group_of_others_is_watched_until_they_end_it() -> None:
    ds_comm.init_distributed()
    assert current().watching()
    ds_comm.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 150
    while watchdogs() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not current().watching()


@world(2)
def test_what_was_said_in_a_world_that_is_over_explains_nothing_of_the_next(tmp_path: Path) -> None:
    rank = dist.get_rank()
    order = ds_comm.init_distributed().order
    assert order is not None
    ds_comm.barrier()
    if rank == 0:  # sees that rank 1 left
        time.sleep(2.5)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    slot = current().begin(order, 10, ("post", "later", -1), None)
    current().waiting(slot)
    assert not current().watching()
    assert current().explain(slot) is None
    dist.barrier()


@world(2, backend=None)
def test_no_limit_of_a_backend_ends_a_rank_whose_patience_is_longer() -> None:
    for deadline_s, days in ((60.0, 7), (0.0, 0)):
        ds_comm.init_distributed("gloo", deadline_s=deadline_s)
        groups = [dist.group.WORLD, ds_comm.duplicate_group(None, "twin").pg]
        limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        assert [limit.days for limit in limits] == [days, days]
        ds_comm.destroy_process_group()


@world(2, backend=None)
def test_zero_turns_the_watchdog_off() -> None:
    ds_comm.init_distributed("gloo", deadline_s=0)
    assert watchdogs() == 0
    ds_comm.barrier()
    ds_comm.destroy_process_group()


@world(2)
def test_a_forgotten_watchdog_ends_with_the_process_group() -> None:
    ds_comm.init_distributed()
    with ds_comm.extend_timeout(5):
        ds_comm.barrier()
        assert watchdogs() == 1
        dist.destroy_process_group()
        deadline = time.monotonic() + 150
        while watchdogs() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert watchdogs() == 0


@pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm: {shm_group.available()}")
@pytest.mark.parametrize(("variable", "expected"), [("", "shm"), ("gloo", "gloo")])
@world(2, backend=None)
def test_cpu_ranks_of_one_host_share_memory_by_default(
    variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("DS_COMM_BACKEND", variable)
    ds_comm.init_distributed()
    assert dist.get_backend() == expected
    x = torch.ones(3)
    ds_comm.all_reduce(x)
    assert x.tolist() == [2, 2, 2]
    ds_comm.destroy_process_group()


@world(2, backend=None)
def test_ranks_that_cannot_share_memory_agree_on_gloo_and_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rank = int(os.environ["RANK"])
    told: list[str] = []
    monkeypatch.setattr(process_group, "available", lambda: "a sandbox" if rank == 1 else "")
    monkeypatch.setattr(process_group._log, "warning", lambda text, *values: told.append(text % values))
    ds_comm.init_distributed()
    assert dist.get_backend() == "gloo"
    assert told == (
        ["CPU ranks communicate over gloo, which is slower: shm cannot be used, rank 1: a sandbox"] * (rank == 0)
    )
    ds_comm.destroy_process_group()
