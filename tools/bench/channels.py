"""One-way time of a message between two ranks: channels in memory, channels over gloo, and gloo's own send and receive.

    python tools/bench/channels.py [KIB ...]

First channels in memory in a row, as a pipeline has them; then the three take turns, so that whatever else the machine does meets all of
them. Prints medians, the fastest tenth, and ratios to gloo.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ds_comm
from ds_comm.channels import Channels

ROUNDS, TIMES = 15, 40
Trip = Callable[[torch.Tensor, torch.Tensor], None]


def trips(rank: int) -> dict[str, Trip]:
    """Each sends a tensor to the other rank and gets one back."""
    found: dict[str, Trip] = {}
    for name, shared in (("memory", True), ("messages", False)):
        channels = Channels(None, shared=shared)
        to, source = channels.sender(1 - rank), channels.receiver(1 - rank)

        def trip(x: torch.Tensor, y: torch.Tensor, to=to, source=source) -> None:  # type: ignore[no-untyped-def]
            if rank:
                source.recv()
            to.send((x,)).wait()
            if not rank:
                source.recv()

        found[name] = trip
    world = dist.group.WORLD
    assert world is not None

    def plain(x: torch.Tensor, y: torch.Tensor) -> None:
        if rank:
            world.recv([y], 1 - rank, 1).wait()
        world.send([x], 1 - rank, 1).wait()
        if not rank:
            world.recv([y], 1 - rank, 1).wait()

    return {**found, "gloo": plain}


def measured(every: dict[str, Trip], x: torch.Tensor, y: torch.Tensor) -> dict[str, list[float]]:
    """Microseconds one way, of each trip, in turns."""
    times: dict[str, list[float]] = {name: [] for name in every}
    for turn in range(ROUNDS + 1):
        for name, trip in every.items():
            for _ in range(TIMES):
                began = time.perf_counter()
                trip(x, y)
                if turn:
                    times[name].append((time.perf_counter() - began) / 2 * 1e6)
    return times


def rank_main(sizes: list[int]) -> None:
    """Measure on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    rank = ds_comm.init_distributed("gloo").rank
    every = trips(rank)
    for kib in sizes:
        x, y = torch.randn(kib * 256), torch.empty(kib * 256)
        alone = {"row": measured({"row": every["memory"]}, x, y)["row"]}
        times = {**alone, **measured(every, x, y)}
        if rank == 0:
            best = {name: statistics.quantiles(found, n=10)[0] for name, found in times.items()}
            for name, found in times.items():
                print(
                    f"{kib:6d} KiB  {name:8s}  median {statistics.median(found):8.1f} us  fastest tenth {best[name]:8.1f} us  "
                    f"{best['gloo'] / best[name]:5.2f} x gloo",
                    flush=True,
                )
    ds_comm.barrier()
    ds_comm.destroy_process_group()


def main() -> None:
    """Start two ranks of this file."""
    words = sys.argv[1:] or ["1", "64", "1024"]
    if "RANK" in os.environ:
        rank_main([int(word) for word in words])
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *words],
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
        )
        for r in (0, 1)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
