"""One rank that diverges: `ranks.py CASE BACKEND DEADLINE_S`, with the variables of torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm.channels import Channels
from ds_comm.node_topology import neighbours
from ds_comm.shm.shm_sequence import ShmSequence
from ds_comm.shm.symmetric_arena import Arena
from ds_ops.shm_collectives import SharedSegment


def shared_memory(world: ds_comm.Group, case: str, deadline_s: float) -> None:
    """Numbers, arenas and channels that a rank does not come to."""
    pids = [one.pid for one in neighbours(world)]
    segment = SharedSegment(ShmSequence.nbytes_for(world.size)) if world.rank == 0 else None
    token = ds_comm.broadcast_json(segment.token if segment else "", world)
    tally = ShmSequence(segment or SharedSegment.attach(token, ShmSequence.nbytes_for(world.size)), 0, world, pids)
    arena, channels = Arena(world), Channels(world)
    tally.wait(tally.advance("layers.0"), "layers.0")
    stuck = world.rank == 1
    if stuck and "slow" in case:
        with ds_comm.extend_timeout(60):
            time.sleep(2 * deadline_s)
    elif stuck and "gone" in case:
        raise SystemExit(0)
    elif stuck and "other" not in case:
        time.sleep(600)
    if "number" in case or "slow" in case:
        what = f"layers.{1 + stuck if 'other' in case else 1}"
        tally.wait(tally.advance(what), what)
    if "arena" in case or "slow" in case:
        arena.barrier("layers.1")
    if "channel" in case or "slow" in case:
        if world.rank == 0:
            channels.receiver(1, unit="hidden").recv()
        else:
            channels.sender(0, unit="hidden").send((torch.ones(1),)).wait()
    print("finished")


def called_by_torch(case: str, backend: str, deadline_s: float) -> None:
    """A program that never calls this package but for the watchdog, after torch's own `init_process_group`."""
    dist.init_process_group(backend, init_method="env://")
    rank, x = dist.get_rank(), torch.ones(8)
    model = DistributedDataParallel(torch.nn.Linear(8, 4)) if "ddp" in case else None
    sub = dist.new_group([0, 1])

    def step() -> None:
        if model is None:
            dist.all_reduce(x, group=sub)
        else:
            model(x).sum().backward()

    for _ in range(3):
        step()
    ds_comm.init_distributed(deadline_s=deadline_s)
    if rank == 1 and "sleeps" in case:
        time.sleep(600)
    if rank == 1 and "asks" in case:
        with ds_comm.extend_timeout(60):
            time.sleep(2 * deadline_s)
    if rank == 1 and "other" in case:
        dist.broadcast(x, 0, group=sub)
    if rank == 0 and "works" in case:
        work = dist.all_reduce(x, group=sub, async_op=True)
        until = time.monotonic() + 2 * deadline_s
        while time.monotonic() < until:  # nobody waits
            sum(range(1000))
        work.wait()
    elif rank == 1 and "works" in case:
        time.sleep(1.8 * deadline_s)
        step()
    else:
        step()
    print("finished")
    dist.barrier()


WARM_UP_S = 120.0  # connections are made in the first collectives, which a busy machine may take long for


def run(case: str, backend: str, deadline_s: float) -> None:
    if case.startswith("torch"):
        return called_by_torch(case, backend, deadline_s)
    world = ds_comm.init_distributed(backend, deadline_s=deadline_s)
    rank, steps = world.rank, 3
    x = torch.ones(8)

    def forward(layers: int = 3, skip: int = -1) -> None:
        for layer in range(layers):
            if layer != skip:
                ds_comm.all_reduce(x, unit=f"layers.{layer}")

    def save() -> None:
        ds_comm.barrier(unit="save")

    with ds_comm.extend_timeout(WARM_UP_S):
        for _ in range(steps):
            forward()
    if case == "skips a submodule":
        forward(skip=1 if rank == 1 else -1)
        save()
    elif case == "one forward fewer":
        for _ in range(steps - rank):
            forward()
        save()
    elif case == "shorter loader":
        for _ in range(steps - rank):
            forward()
    elif case == "raises":
        if rank == 1:
            raise ValueError("boom in forward")
        forward()
    elif case == "saves alone":
        save() if rank == 1 else forward()
    elif case == "another shape":
        ds_comm.all_reduce(torch.ones(8 + rank), unit="layers.0")
    elif case == "another dtype":
        ds_comm.all_reduce(torch.ones(8, dtype=(torch.float32, torch.float64)[rank]), unit="layers.0")
    elif case == "another root":
        ds_comm.broadcast(x, rank, unit="layers.0")
    elif case == "sleeps":
        if rank == 1:
            time.sleep(600)
        forward()
    elif case == "is killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        forward()
    elif case == "both receive":
        ds_comm.recv(x, 1 - rank, unit="activations")
    elif case.startswith("shared memory"):
        shared_memory(world, case, deadline_s)
    elif case == "asks for patience":
        if rank == 1:
            with ds_comm.extend_timeout(60):
                time.sleep(2 * deadline_s)
        forward()
        print("finished")
    elif case == "rank 0 ends first":
        if rank == 1:
            forward()
    elif case == "finishes early":
        if rank == 1:
            time.sleep(2 * deadline_s)  # a rank may work on after the last collective, whoever has left
        print("finished")
    else:
        raise SystemExit(f"no case {case!r}")


run(sys.argv[1], sys.argv[2], float(sys.argv[3]))
