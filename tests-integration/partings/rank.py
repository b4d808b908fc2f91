"""One rank of a job in which one rank parts from the others: `rank.py JSON`, with the variables of torchrun.

`who` does `kind` at `moment` of the third step; the others train on. Prints START and PART with the clock of the host, and
"finished" at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import ds_comm
import ds_zero

WARM_UP_S = 300.0  # connections are made in the first steps, which a busy machine may take long for
STEPS, WARM_UP = 5, 2
BEFORE = "before they met"
LEAST_RENDEZVOUS_S = 20.0  # shorter deadlines do not bound the rendezvous


def boom() -> None:
    raise ValueError("boom")


class Parting:
    """What `who` does when its moment has come."""

    def __init__(self, kind: str, deadline_s: float, active: bool) -> None:
        self.kind, self.deadline_s, self.active = kind, deadline_s, active
        self.armed = False

    def come(self) -> None:
        if not (self.active and self.armed):
            return
        self.armed = False
        print(f"PART {time.monotonic()}", flush=True)
        if self.kind == "stuck":
            time.sleep(600 if self.deadline_s < LEAST_RENDEZVOUS_S else 2 * self.deadline_s)
        elif self.kind == "slow":
            with ds_comm.extend_timeout(60):
                time.sleep(2 * self.deadline_s)
        elif self.kind == "gone":
            sys.exit(0)
        elif self.kind == "killed":
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "shape":
            ds_comm.all_reduce(torch.ones(3), unit="mine alone")
        elif self.kind in ("hook", "loader", "scheduler"):
            boom()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + self.layers[number](x)
        return x


def batches(rank: int, parting: Parting) -> Iterator[Tensor]:
    for step in range(STEPS):
        if parting.kind == "loader":
            parting.come()
        yield torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * rank + step))


def run(stage: int, transport: str, who: int, moment: str, kind: str, deadline_s: float) -> None:
    print(f"START {time.monotonic()}", flush=True)
    backend, _, memory = transport.partition("+")
    if moment == BEFORE and int(os.environ["RANK"]) == who:
        early = Parting(kind, deadline_s, True)
        early.armed = True
        early.come()
        return  # nobody watches a rank before it came
    world = ds_comm.init_distributed(backend, deadline_s=deadline_s)
    with ds_comm.extend_timeout(WARM_UP_S):
        torch.manual_seed(0)
        model = Net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ds_zero.shard(model, sgd, stage=stage, memory=memory or "auto")
        parting = Parting(kind, deadline_s, world.rank == who)
        # A loader and a scheduler have their own places; the others part where `moment` says.
        here = moment if kind not in ("loader", "scheduler") else kind
        model.layers[1].register_forward_pre_hook(lambda module, args: parting.come() if here == "forward" else None)

        def one(x: Tensor) -> None:
            out = model(x)
            if here == "backward":
                out.register_hook(lambda grad: parting.come())
            out.square().mean().backward()
            if here == "before the update":
                parting.come()
            optimizer.step()
            optimizer.zero_grad()
            if here in ("between steps", "scheduler"):
                parting.come()

        for x in list(batches(world.rank, parting))[:WARM_UP]:
            one(x)
    parting.armed = True
    if parting.active and kind in ("branch", "order"):
        print(f"PART {time.monotonic()}", flush=True)
        model.order = [0, 2, 3] if kind == "branch" else [0, 2, 1, 3]
    for x in batches(world.rank, parting):
        one(x)
    optimizer.close()
    ds_comm.barrier(unit="end")
    print("finished", flush=True)


run(**json.loads(sys.argv[1]))
