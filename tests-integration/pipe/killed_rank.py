"""One rank of a pipeline of which one is killed in the middle of its third step: `killed_rank.py JSON`, with the variables of torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_comm
import ds_pipe

WARM_UP_S = 300.0  # connections are made in the first steps, which a busy machine may take long for
MICROBATCHES, WIDTH = 6, 8


class Block(nn.Module):
    """Kills its process at its third step, in a forward or a backward of its fourth microbatch."""

    calls, armed, moment = 0, False, "forward"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x)
        Block.calls += 1
        if Block.armed and Block.calls == 4:
            if Block.moment == "forward":
                end()
            out.register_hook(lambda grad: end())
        return out


def end() -> None:
    print(f"PART {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def run(backend: str, schedule: str, who: int, moment: str, deadline_s: float) -> None:
    print(f"START {time.monotonic()}", flush=True)
    world = ds_comm.init_distributed(backend, deadline_s=deadline_s)
    with ds_comm.extend_timeout(WARM_UP_S):
        layers = [ds_pipe.LayerSpec(Block) for _ in range(world.size)]
        model = ds_pipe.PipelineModule(
            layers, num_stages=world.size, loss_fn=functional.mse_loss, seed_layers=True, schedule=schedule
        )
        step = ds_pipe.pipeline(model, MICROBATCHES)
        data = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * MICROBATCHES
        for _ in range(2):
            step(data)
    Block.moment, Block.calls, Block.armed = moment, 0, world.rank == who
    for _ in range(3):
        step(data)
    print("finished", flush=True)


run(**json.loads(sys.argv[1]))
