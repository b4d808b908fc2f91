"""init_distributed on ranks of a pool: made by it, or found."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

import ds_comm
from ds_comm.recorder import current
from ds_testing import world

WATCHDOG = "ds-comm-watchdog"


def watchdogs() -> int:
    return sum(thread.name == WATCHDOG for thread in threading.enumerate())


@world(2, backend=None)
def test_what_the_launcher_says_is_used() -> None:
    group = ds_comm.init_distributed("gloo")
    assert (group.size, group.ranks) == (2, (0, 1))
    assert watchdogs() == 1
    assert ds_comm.init_distributed().channel is group.channel
    assert watchdogs() == 1
    x = torch.ones(2)
    ds_comm.all_reduce(x, unit="first")
    assert x.tolist() == [2, 2]
    ds_comm.destroy_process_group()
    assert not dist.is_initialized()
    assert watchdogs() == 0
    assert not current().watching()


@world(2)
def test_a_process_group_of_others_is_watched_until_they_end_it() -> None:
    ds_comm.init_distributed()
    assert current().watching()
    ds_comm.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while watchdogs() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not current().watching()


@world(2, backend=None)
def test_zero_turns_the_watchdog_off() -> None:
    ds_comm.init_distributed("gloo", deadline_s=0)
    assert watchdogs() == 0
    ds_comm.barrier()
    ds_comm.destroy_process_group()


@world(2)
def test_a_forgotten_watchdog_ends_with_the_process_group() -> None:
    ds_comm.init_distributed()
    with ds_comm.patience(5):
        ds_comm.barrier()
