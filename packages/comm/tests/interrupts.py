"""Ctrl-C while a rank waits in shared memory: `interrupts.py CASE`, with the variables of torchrun. Rank 1 never comes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import ds_comm
from ds_comm.channels import Channels
from ds_comm.shm.symmetric_arena import Arena

WAITS_S = 0.7


def run(case: str) -> None:
    world = ds_comm.init_distributed("shm", deadline_s=300)
    small, large = torch.ones(8), torch.ones(1 << 20)
    arena, channels = Arena(world), Channels(world)
    ds_comm.barrier()
    if world.rank == 1:
        sys.stdin.read()  # until rank 0 has ended, or the test
        return
    hit: list[float] = []

    def press() -> None:
        time.sleep(WAITS_S)
        hit.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    calls = {
        "small": lambda: ds_comm.all_reduce(small),
        "large": lambda: ds_comm.all_reduce(large),
        "asynchronous": lambda: ds_comm.all_reduce(large, async_op=True).wait(),
        "message": lambda: dist.recv(small, 1),
        "arena": arena.barrier,
        "channel": channels.receiver(1).recv,
    }
    threading.Thread(target=press).start()
    try:
        calls[case]()
    except KeyboardInterrupt:
        print(f"returned after {time.perf_counter() - hit[0]:.3f} s", flush=True)
    os._exit(0)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
faulthandler.dump_traceback_later(80)  # where it stands, should the test give up on it after 100 s
run(sys.argv[1])
