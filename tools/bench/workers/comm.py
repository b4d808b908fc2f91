"""One rank of tools/bench/comm.py: `comm.py MODE`. Rank 0 prints a JSON object."""

from __future__ import annotations

import json
import os
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
from ds_comm.shm.symmetric_arena import Arena, TensorRequest
from ds_comm.watch.recorder import start_recorder, stop_recorder
from ds_comm.watch.watchdog import WatchSettings
from ds_ops.host_arena import zeros_huge
from ds_ops.shm_collectives import combine

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_gpt"))
from model import GPT, GPTConfig

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
BUDGET_S = 1.5  # of one row: all variants of one operation at one size
QUIET, TRIES = 0.04, 4
BARRIERS = 200  # one of an arena is too short for a clock
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def alternate(runs: Mapping[str, Callable[[], object]], budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Seconds of each variant on its slower rank, in turns: median and best. Every call starts with all ranks ready.

    A turn is two calls: the first one finds what the variant before left in the caches and on the cores (`median_s`, `best_s`),
    the second one what its own kind left (`row_s`). `over_s`: median difference to the first variant, call by call.

    `others`: share of the machine that processes other than the ranks took meanwhile. Where that is much, it is measured
    again, and the quietest of some tries counts.
    """
    tries = []
    while not tries or (tries[-1]["others"] > QUIET and len(tries) < TRIES):
        tries.append(measured(runs, budget_s))
    return min(tries, key=lambda found: found["others"])


def measured(runs: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, Any]:
    for run in runs.values():
        run()
    began = time.perf_counter()
    for run in runs.values():
        once(run)
    longest = agreed_max([time.perf_counter() - began])[0]
    turns = max(5, min(200, int(budget_s / longest / 2)))
    before = cpu_seconds()
    seconds = [[once(run) for run in runs.values() for _ in range(2)] for _ in range(turns)]
    machine, own, elapsed = (after - first for after, first in zip(cpu_seconds(), before, strict=True))
    flat = agreed_max([s for row in seconds for s in row])
    columns = [flat[i :: 2 * len(runs)] for i in range(2 * len(runs))]
    ours = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(ours)
    others = (machine - float(ours)) / elapsed / (os.cpu_count() or 1)
    return {
        **{
            name: {
                "median_s": statistics.median(first),
                "best_s": min(first),
                "row_s": statistics.median(second),
                "over_s": statistics.median(
                    a - b for a, b in zip(first + second, columns[0] + columns[1], strict=True)
                ),
                "turns": turns,
            }
            for name, first, second in zip(runs, columns[::2], columns[1::2], strict=True)
        },
        "others": round(agreed_max([max(others, 0.0)])[0], 3),
    }


def cpu_seconds() -> tuple[float, float, float]:
    """What all processes of the machine used since it started (and what its host took), what this one used, and the time."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy, own.user + own.system, time.perf_counter()


def once(run: Callable[[], object]) -> float:
    READY[0]()
    READY[0]()  # the first one may end with a rank that slept and wakes up later than the other
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
    """Tensors born in shared memory, against torch's collectives on gloo for the same message.

    What both read from and write to of their own is in huge pages, as shared tensors are. `limit` is the arena's pass over
    memory of each rank's own, without a word to the other.
    """
    group, rows = ds_comm.world_group(), []
    n, rank = group.size, group.rank
    place = Arena(group)
    READY[0] = place.barrier
    for nbytes in SIZES:
        numel = nbytes // 4
        (shared,), symmetric = place.allocate(
            [TensorRequest(numel, torch.float32, shared=True), TensorRequest(numel, torch.float32)]
        )
        mine = slice(rank * numel // n, (rank + 1) * numel // n)
        shared[mine] = 1.0
        symmetric[rank].fill_(1.0)
        sizes = [(numel, 2), (numel, 3), (numel // n, 2)]
        (private,), (other,), (part,) = (zeros_huge([count], torch.float32, stream=stream) for count, stream in sizes)
        private.fill_(1.0)  # memory that was never written is one page of zeros, which stays in the cache
        other.fill_(1.0)
        rows.append({"op": "reduce_scatter", "nbytes": nbytes, **alternate({
            "gloo": lambda: reduce_scatter_single(part, private),
            "arena": lambda: place.reduce_scatter(part, symmetric),
            "limit": lambda: combine(part, [private[mine], other[mine]]),
        })})  # fmt: skip

        rows.append({"op": "all_gather", "nbytes": nbytes, **alternate({
            "gloo": lambda: all_gather_single(private, part),
            "arena copy-out": lambda: place.all_gather(private, shared),
            "arena view": place.barrier,
            "limit": lambda: combine(private.view(torch.uint8), [other.view(torch.uint8)]),
        })})  # fmt: skip
    many = {"gloo": dist.barrier, "arena": place.barrier}
    runs = {name: lambda meet=meet: [meet() for _ in range(BARRIERS)] for name, meet in many.items()}
    rows.append({"op": f"{BARRIERS} barriers", "nbytes": 0, **alternate(runs)})
    return {"rows": rows}


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
        found[f"batch {batch}"] = alternate(runs, 20.0 + 2.5 * batch)
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
    modes: dict[str, Callable[[], dict[str, Any]]] = {
        "collectives": collectives,
        "arena": arena,
        "ddp": ddp,
        "recorder": recorder,
    }
    found = modes[sys.argv[1]]()
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    ds_comm.destroy_process_group()


if __name__ == "__main__":
    main()
