"""`nox -s bench -- ddp_hooks`: steps of torch's DDP with compressed gradients beside exact ones, on two ranks of one machine, over gloo.

A backward and its reduction, in turns in one job; a ratio is the median over rounds of (exact / compressed): above 1 the codes are faster. Here
messages go through memory, where bytes cost little and quantizing takes the same cores; between hosts the share of bytes counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm.codecs.ddp_hooks import compress_ddp

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "ddp_hooks.json"
BYTES = {
    "exact": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.016,
    "fp8": 1.016,
    "int4": 0.563,
}  # sent for an element and hop
WIDTH, LAYERS = 1024, 6


def step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    dist.barrier()
    begun = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - begun


def rank_main(rank: int, port: int, rounds: int, target: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    ds_comm.init_distributed("gloo", deadline_s=0)
    models: dict[str, nn.Module] = {}
    for method in (*BYTES, "powersgd"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        wrapped = models[method] = DistributedDataParallel(net)
        if method == "powersgd":
            compress_ddp(wrapped, PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2))
        elif method != "exact":
            compress_ddp(wrapped, method)  # type: ignore[arg-type]
    times: dict[str, list[float]] = {method: [] for method in models}
    x = torch.randn(4, WIDTH)
    for number in range(rounds + 3):
        for method, model in models.items():
            seconds = step_seconds(model, x)
            if number >= 3:
                times[method].append(seconds)
    if rank == 0:
        lines = []
        for method, took in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["exact"], took, strict=True))
            lines.append(
                {"method": method, "ms": 1e3 * statistics.median(took), "ratio": ratio, "bytes": BYTES.get(method)}
            )
            print(f"{method}: {lines[-1]['ms']:.1f} ms, {ratio:.2f}x exact")
        machine = f"{platform.machine()}, {os.cpu_count()} cores, 2 ranks, gloo, torch {torch.__version__}"
        config = f"{WIDTH * WIDTH * LAYERS / 1e6:.1f} M parameters"
        record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "config": config, "lines": lines}
        Path(target).write_text(json.dumps(record, indent=1) + "\n")
    ds_comm.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(rank_main, (port, args.rounds, str(DATA)), nprocs=2)


if __name__ == "__main__":
    main()
