"""One rank of the pipeline benchmark: `pipe.py ENGINE:SCHEDULE,... CYCLES STEPS`.

Kernels sleep: every rank has so many milliseconds of forward, input gradient and weight gradient for each microbatch, whatever its number of
stages, so that what is timed is the schedule and what running it costs, on any number of processors.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

MICROBATCHES, PASS_S, WIDTH, ROWS = 8, 0.008, 64, 4


class _Path(torch.autograd.Function):
    """The value as it is; its gradient takes a while."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        time.sleep(ctx.backward_s)
        return grads[0].clone(), None, None


class Sleeper(nn.Module):
    """y = x + w; each of the three passes takes `pass_s`."""

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        self.weight, self.pass_s = nn.Parameter(torch.zeros(WIDTH)), pass_s

    def forward(self, x: Tensor) -> Tensor:
        return _Path.apply(x, self.pass_s, self.pass_s) + _Path.apply(self.weight, 0.0, self.pass_s)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def ours(schedule: str, ranks: int):
    import ds_pipe

    stages = len(ds_pipe.placement_of(schedule, ranks))
    pass_s = PASS_S * ranks / stages
    layers = [ds_pipe.LayerSpec(Sleeper, pass_s) for _ in range(stages)]
    model = ds_pipe.PipelineModule(
        layers, num_stages=ranks, loss_fn=loss_fn, partition_method="uniform", schedule=schedule
    )
    step = ds_pipe.pipeline(model, MICROBATCHES)

    def run(data: list[tuple[Tensor, Tensor]]) -> None:
        step(data)
        model.zero_grad()

    return run


def torchs(schedule: str, ranks: int):
    from torch.distributed import pipelining

    kind = {"1f1b": pipelining.Schedule1F1B, "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
            "zbv": pipelining.ScheduleZBVZeroBubble}[schedule]  # fmt: skip
    rank, each = dist.get_rank(), 1 if schedule == "1f1b" else 2
    numbers = [rank] if each == 1 else [rank, 2 * ranks - 1 - rank] if schedule == "zbv" else [rank, rank + ranks]
    sample = torch.zeros(ROWS, WIDTH, requires_grad=True)
    modules = [Sleeper(PASS_S / each) for _ in numbers]
    stages = [
        pipelining.PipelineStage(
            module, number, each * ranks, torch.device("cpu"), input_args=sample, output_args=sample
        )
        for module, number in zip(modules, numbers, strict=True)
    ]
    engine = kind(stages[0] if each == 1 else stages, MICROBATCHES, loss_fn=loss_fn)

    def run(data: list[tuple[Tensor, Tensor]]) -> None:
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        last = any(number == each * ranks - 1 for number in numbers)
        engine.step(*([x] if 0 in numbers else []), **({"target": y, "losses": []} if last else {}))
        for module in modules:
            module.zero_grad()

    return run


def main(engines: list[str], cycles: int, steps: int) -> None:
    """All engines live in the same ranks and take turns, in an order drawn anew; a first cycle is not counted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    makers = {"ours": ours, "torch": torchs}
    runs = {name: makers[name.partition(":")[0]](name.partition(":")[2], dist.get_world_size()) for name in engines}
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)) for _ in range(MICROBATCHES)]
    found: dict[str, list[float]] = {name: [] for name in engines}
    order = random.Random(0)
    for cycle in range(cycles + 1):
        for name in order.sample(engines, len(engines)):
            for _ in range(steps):
                dist.barrier()
                began = time.perf_counter()
                runs[name](data)
                took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)  # a step ends when its slowest rank has ended
                if cycle:
                    found[name].append(1e3 * float(took))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))
