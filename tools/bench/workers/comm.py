"""One rank of tools/bench/comm.py: `comm.py MODE`. Rank 0 prints a JSON object."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm.arena import Arena, Wish
from ds_comm.recorder import start_recorder, stop_recorder
from ds_comm.watchdog import WatchSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_gpt"))
from model import GPT, GPTConfig

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
BUDGET_S = 1.5  # of one row: all variants of one operation at one size
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def alternate(runs: Mapping[str, Callable[[], object]], budget_s: float = BUDGET_S) -> dict[str, dict[str, float]]:
    """Seconds of each variant on its slower rank, in turns: median and best. Every turn starts with all ranks ready."""
    for run in runs.values():
        run()
    began = time.perf_counter()
    for run in runs.values():
        once(run)
    longest = agreed_max([time.perf_counter() - began])[0]
    turns = max(5, min(200, int(budget_s / longest)))
    seconds = [[once(run) for run in runs.values()] for _ in range(turns)]
    flat = agreed_max([s for row in seconds for s in row])
    columns = [flat[i :: len(runs)] for i in range(len(runs))]
    return {
        name: {"median_s": statistics.median(column), "best_s": min(column), "turns": turns}
        for name, column in zip(runs, columns, strict=True)
    }


def once(run: Callable[[], object]) -> float:
    READY[0]()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


READY: list[Callable[[], object]] = [lambda: None]


def agreed_max(values: Sequence[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(x) for x in found]


def collectives() -> dict[str, Any]:
    """torch's functions on two backends, and one memcpy of the same message on every rank at the same time."""
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    READY[0] = lambda: dist.barrier(groups["shm"])
    n, rank, rows = dist.get_world_size(), dist.get_rank(), []
    for nbytes in SIZES:
        message, other = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        part = torch.ones(nbytes // 4 // n)
        table: dict[str, Callable[[Any], Callable[[], object]]] = {
            "all_reduce": lambda g: lambda: dist.all_reduce(message, group=g),
            "all_gather": lambda g: lambda: all_gather_single(message, part, group=g),
            "reduce_scatter": lambda g: lambda: reduce_scatter_single(part, message, group=g),
        }
        for op, on in table.items():
            runs = {name: on(group) for name, group in groups.items()}
            runs["memcpy"] = lambda: other.copy_(message)
            rows.append({"op": op, "nbytes": nbytes, **alternate(runs)})
            message.fill_(1.0)
            if rank == 0:
                sys.stderr.write(f"{op} {nbytes}\n")
    async_rows = {
        name: lambda g=group: dist.all_reduce(part, group=g, async_op=True).wait() for name, group in groups.items()
    }
    part = torch.ones(1024)
    rows.append({"op": "all_reduce async", "nbytes": 4096, **alternate(async_rows)})
    rows.append(
        {"op": "barrier", "nbytes": 0, **alternate({k: lambda g=g: dist.barrier(g) for k, g in groups.items()})}
    )
    return {"rows": rows}


def arena() -> dict[str, Any]:
    """Tensors born in shared memory, against torch's collectives on gloo for the same message."""
    group, rows = ds_comm.world_group(), []
    n, rank = group.size, group.rank
    place = Arena(group)
    READY[0] = place.barrier
    for nbytes in SIZES:
        numel = nbytes // 4
        (shared,), symmetric = place.allocate([Wish(numel, torch.float32, shared=True), Wish(numel, torch.float32)])
        mine = slice(rank * numel // n, (rank + 1) * numel // n)
        shared[mine] = 1.0
        symmetric[rank].fill_(1.0)
        private, part = torch.zeros(numel), torch.zeros(numel // n)
        rows.append({"op": "reduce_scatter", "nbytes": nbytes, **alternate({
            "gloo": lambda: reduce_scatter_single(part, private),
            "arena": lambda: place.reduce_scatter(part, symmetric),
        })})  # fmt: skip

        def gathered(out: Tensor | None) -> None:
            place.barrier()
            if out is not None:
                out.copy_(shared)

        rows.append({"op": "all_gather", "nbytes": nbytes, **alternate({
            "gloo": lambda: all_gather_single(private, part),
            "arena copy-out": lambda: gathered(private),
            "arena view": lambda: gathered(None),
        })})  # fmt: skip
    times = []
    for _ in range(20):
        READY[0]()
        began = time.perf_counter()
        for _ in range(200):
            place.barrier()
        times.append((time.perf_counter() - began) / 200)
    return {"rows": rows, "barrier": {"median_s": statistics.median(times), "best_s": min(times)}}


def ddp() -> dict[str, Any]:
    """What stock DDP adds to forward and backward, on either backend, at one and many samples a step."""
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    READY[0] = lambda: dist.barrier(groups["shm"])
    found = {}
    for batch in (1, 8):
        torch.manual_seed(dist.get_rank())
        data = torch.randint(0, 256, (batch, 65))
        models: dict[str, torch.nn.Module] = {"alone": GPT(GPTConfig())}
        for name, group in groups.items():
            models[name] = DistributedDataParallel(GPT(GPTConfig()), process_group=group, gradient_as_bucket_view=True)
        runs = {name: lambda model=model: step(model, data) for name, model in models.items()}
        found[f"batch {batch}"] = alternate(runs, 30.0)
    return {"rows": found}


def step(model: torch.nn.Module, data: Tensor) -> None:
    model(data).backward()
    for parameter in model.parameters():
        parameter.grad = None


def recorder() -> dict[str, Any]:
    """A step of 40 reductions of gradients with the recorder and without, and what one operation costs."""
    group = ds_comm.as_group(dist.new_group(backend="shm"))
    READY[0] = lambda: dist.barrier(group.pg)
    model, data = GPT(GPTConfig()), torch.randint(0, 256, (4, 65))
    units = [f"blocks.{i}" for i in range(40)]
    tiny = torch.zeros(16)

    def train() -> None:
        model(data).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for unit, gradient in zip(units, gradients, strict=False):
            ds_comm.all_reduce(gradient, group=group, unit=unit)
        for parameter in model.parameters():
            parameter.grad = None

    def many() -> None:
        for _ in range(100):
            ds_comm.all_reduce(tiny, group=group, unit="tiny")

    found: dict[str, Any] = {}
    watched = WatchSettings(deadline_s=60.0, local_size=dist.get_world_size())
    before = resident_bytes()
    rounds: dict[str, dict[str, list[float]]] = {"step": {"off": [], "on": []}, "100 operations": {"off": [], "on": []}}
    for _ in range(8):
        for name in ("off", "on"):
            if name == "on":
                start_recorder(watched)
            for what, run in (("step", train), ("100 operations", many)):
                run()
                rounds[what][name] += agreed_max([once(run) for _ in range(12)])
            if name == "on":
                found["recorder_bytes"] = resident_bytes() - before
                dist.barrier(group.pg)
                stop_recorder("bench")
    for what, columns in rounds.items():
        found[what] = {k: {"median_s": statistics.median(v), "best_s": min(v)} for k, v in columns.items()}
    return found


def resident_bytes() -> int:
    """Private and shared memory of this process that the recorder's file takes: its pages in the memory map."""
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = "ds-comm-ring" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def main() -> None:
    torch.set_num_threads(1)
    ds_comm.init_distributed("gloo", deadline_s=0)
    found = {"collectives": collectives, "arena": arena, "ddp": ddp, "recorder": recorder}[sys.argv[1]]()
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    ds_comm.destroy_process_group()


if __name__ == "__main__":
    main()
