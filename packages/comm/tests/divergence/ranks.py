"""Ranks that diverge: started by test_divergence.py, which tells on standard input what to run.

A line in is a list of ranks, each a dict: the environment, the file for its output, the case. For each a child is forked
that ends like any Python process does; a line out is their exit codes and seconds. Forking spares each the import of torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

import ds_comm
import ds_comm.mesh  # the children import nothing large


def serve() -> tuple[str, str, float] | None:
    """Fork what is asked for. Returns the case, backend and deadline in a child, None at the end of input."""
    for line in sys.stdin:
        began, children = time.monotonic(), []
        for rank in json.loads(line):
            child = os.fork()
            if child == 0:
                out = os.open(rank["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.environ.update(rank["env"])
                return rank["case"], rank["backend"], rank["deadline_s"]
            children.append(child)
        ends = {}
        while len(ends) < len(children):
            child, status = os.wait()
            ends[child] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
        print(json.dumps([ends[child] for child in children]), flush=True)
    return None


def run(case: str, backend: str, deadline_s: float) -> None:
    world = ds_comm.init_distributed(backend, deadline_s=deadline_s)
    rank, steps = world.rank, 3
    x = torch.ones(8)

    def forward(layers: int = 3, skip: int = -1) -> None:
        for layer in range(layers):
            if layer != skip:
                ds_comm.all_reduce(x, unit=f"layers.{layer}")

    def save() -> None:
        ds_comm.barrier(unit="save")

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
    elif case == "asks for patience":
        if rank == 1:
            with ds_comm.patience(60):
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


task = serve()
if task is not None:
    run(*task)
