"""Saving and loading: bandwidth, stall, bytes, memory, against torch.save, DCP, safetensors and DeepSpeed in one run.

usage: nox -s bench -- ckpt [bandwidth] [cold] [stall] [--directory DIRECTORY] [--repeats N]

All "durable" times end with the bytes on the device (fsync). Cases alternate, medians are reported; the first round warms up.
Loads go into tensors that exist: "bandwidth" loads have their files in the page cache, "cold" ones have not: synced, dropped, and
looked for with mincore before every load, the order of the programs turning by one every round. `raw` is the device: as many
bytes to or from huge pages with O_DIRECT, by the same io_uring engine as ds-ops' own benchmark, and one fsync. Every save makes
new files; those of the turn before are removed outside the timing, for all programs. The state is parameters and Adam's
moments in fp32; DeepSpeed (stage 2, one process, its own environment) adds a second copy of the parameters to its files.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import psutil
import records
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from in_turn import Answering, Times, ratio
from meetings import WORKERS
from safetensors.torch import load_file, save_file

import ds_ckpt
from ds_comm.placement import Box, Interval, TensorShard
from ds_ops.io import AsyncIO, IOSettings
from ds_ops.mapped import MappedFile

TENSORS, NUMEL = 120, 1_025_000
NBYTES = TENSORS * NUMEL * 4


def state(fill: float) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.full((1000, NUMEL // 1000), fill + i) for i in range(TENSORS)}


def synced(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def aligned(nbytes: int) -> mmap.mmap:
    """Memory in huge pages, with something in it: what a transfer past the page cache is fastest with."""
    memory = mmap.mmap(-1, -(-nbytes // 4096) * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(os.urandom(2**20) * (len(memory) // 2**20))
    return memory


def raw_write(path: Path, memory: mmap.mmap) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, len(memory))
        with AsyncIO(IOSettings(block_bytes=2**20, queue_depth=32)) as io:
            io.write(path, memory)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, memory: mmap.mmap) -> None:
    with AsyncIO(IOSettings(block_bytes=2**20, queue_depth=32)) as io:
        io.read(path, memory)


class Shard:
    def __init__(self, shard: TensorShard, data: torch.Tensor) -> None:
        self.shard, self.data = shard, data


def halves(tensors: dict[str, torch.Tensor], rank: int) -> list[Shard]:
    out = []
    for name, tensor in tensors.items():
        cut = tensor.numel() // 2 + 17
        part = Interval(0, cut) if rank == 0 else Interval(cut, tensor.numel())
        shard = TensorShard(name, tuple(tensor.shape), "float32", Box.whole(tuple(tensor.shape)), part)
        out.append(Shard(shard, tensor.reshape(-1)[part.start : part.stop]))
    return out


def timed(action: Callable[[], object]) -> float:
    """Seconds of an action; what runs in another process says its own."""
    gc.collect()
    start = time.perf_counter()
    said = action()
    return said if isinstance(said, float) else time.perf_counter() - start


def deepspeed(folder: Path) -> Answering:
    """A process in DeepSpeed's environment that saves and loads the same state, and times itself."""
    folder.mkdir()
    alone = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29556"}
    command = [peers.ensure("deepspeed"), WORKERS / "ckpt_deepspeed.py", folder, TENSORS // 3, NUMEL]
    return Answering(command, **alone)


@dataclass(frozen=True, slots=True)
class Program:
    """What saves, what loads, or both; and the file or folder that it writes and reads."""

    name: str
    place: Path
    save: Callable[[], object] | None = None
    load: Callable[[], object] | None = None

    def files(self) -> list[Path]:
        return [file for file in [self.place, *self.place.rglob("*")] if file.is_file()]

    def removed(self) -> None:
        """Make room for the next turn."""
        if self.place.is_dir():
            shutil.rmtree(self.place)
        else:
            self.place.unlink(missing_ok=True)

    def warm(self) -> None:
        """Bring the files into the page cache."""
        for file in self.files():
            with file.open("rb", buffering=0) as stream:
                while stream.read(2**24):
                    pass

    def drop(self) -> None:
        """Drop the files from the page cache, and see that they are gone."""
        for file in self.files():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())  # pages that are not written yet would stay
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = MappedFile(file)  # this maps the first page; the others are looked at
            for at in range(2**23, mapped.nbytes, 2**23):
                if mapped.cached(at, 1):
                    raise SystemExit(f"{file} stays in the page cache; --directory names a place on a disk")


def programs(root: Path, peer: Answering) -> list[Program]:
    full, target = state(1.0), state(0.0)
    memory = aligned(NBYTES)
    pt, st, runs = root / "torch.pt", root / "st.safetensors", root / "runs"

    def and_synced(save: Callable[[], object], path: Path) -> Callable[[], object]:
        return lambda: (save(), synced(path))

    def into(load: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], object]:
        return lambda: [target[name].copy_(tensor) for name, tensor in load().items()]

    def ours(shards: Sequence[Any]) -> Callable[[], object]:
        return lambda: ds_ckpt.load(runs / "ours", shards)

    return [
        Program("raw", root / "raw", lambda: raw_write(root / "raw", memory), lambda: raw_read(root / "raw", memory)),
        Program("ds-ckpt", runs, lambda: ds_ckpt.save(runs / "ours", ds_ckpt.full_shards(full), {}), ours(ds_ckpt.full_shards(target))),
        Program("ds-ckpt, as two shards each", runs, load=ours(halves(target, 0) + halves(target, 1))),
        Program("torch.save", pt, and_synced(lambda: torch.save(full, pt), pt)),
        Program("torch.load", pt, load=into(lambda: torch.load(pt, weights_only=True))),
        Program("torch.load, mapped", pt, load=into(lambda: torch.load(pt, weights_only=True, mmap=True))),
        Program("safetensors", st, and_synced(lambda: save_file(full, st), st), into(lambda: load_file(st))),
        # Syncs its files by default.
        Program("dcp", root / "dcp", lambda: dcp.save(full, checkpoint_id=root / "dcp"), lambda: dcp.load(target, checkpoint_id=root / "dcp")),
        Program("deepspeed", root / "peer" / "state", lambda: peer.ask("save"), lambda: peer.ask("load")),
    ]  # fmt: skip


def stalls(root: Path, full: dict[str, torch.Tensor], repeats: int) -> dict[str, list[float]]:
    """How long a call keeps the training step, the writing of the save before being over. Saves go to memory-backed files
    where there are any, so that the disk of this machine is not what is measured."""
    names = ("ds-ckpt", "ds-ckpt, copied behind", "ds-ckpt, process", "dcp.async_save")
    times: dict[str, list[float]] = {name: [] for name in names}
    engine, process = ds_ckpt.AsyncCheckpointer(), ds_ckpt.AsyncCheckpointer(decoupled=True)
    shards = ds_ckpt.full_shards(full)
    for turn in range(repeats + 1):
        now = timed(lambda: engine.save(root / "a" / "x", shards, {}))
        engine.wait()
        behind = timed(lambda: engine.save(root / "a" / "x", shards, {}, behind=True))
        engine.before_update()
        engine.wait()
        apart = timed(lambda: process.save(root / "a" / "y", shards, {}, behind=True))
        process.before_update()
        process.wait()
        futures: list[object] = []
        shutil.rmtree(root / "dcp-async", ignore_errors=True)
        theirs = timed(lambda: futures.append(dcp.async_save(full, checkpoint_id=root / "dcp-async")))
        futures[0].result()  # type: ignore[attr-defined]
        if turn:
            for name, value in zip(times, (now, behind, apart, theirs), strict=True):
                times[name].append(value)
    engine.close()
    process.close()
    return times


def memory_slope(root: Path) -> float:
    """Bytes of resident memory per save over 50 saves, after 10."""
    engine, small = ds_ckpt.AsyncCheckpointer(keep=1), {"w": torch.ones(5_000_000)}
    sizes = []
    for step in range(60):
        engine.save(root / "m" / f"s{step % 2}", ds_ckpt.full_shards(small), {})
        engine.wait()
        sizes.append(psutil.Process().memory_info().rss)
    engine.close()
    return (sizes[-1] - sizes[10]) / 50


def bandwidth(root: Path, repeats: int) -> dict[str, object]:
    """Durable saves, and loads of files in the page cache, of every program in turn."""
    save_s: Times = {}
    load_s: Times = {}
    peer = deepspeed(root / "peer")
    try:
        every = programs(root, peer)
        for turn in range(-1, repeats):
            for program in every:
                if program.save is not None:
                    program.removed()
                    save_s.setdefault(program.name, []).append(timed(program.save))
            for program in every:
                if program.load is not None and program.name != "raw":
                    program.warm()
                    load_s.setdefault(program.name, []).append(timed(program.load))
            if turn < 0:  # the first round warms up
                save_s.clear()
                load_s.clear()
    finally:
        peer.close()
    size = {one.name: sum(file.stat().st_size for file in one.files()) / NBYTES for one in every}
    beside = {
        f"save over {name}": over(save_s, name) for name in ("raw", "dcp", "torch.save", "safetensors", "deepspeed")
    }
    return {
        "save_gb_per_s": rates(save_s),
        "load_gb_per_s": rates(load_s),
        "bytes_over_minimum": size["ds-ckpt"],
        "deepspeed_bytes_over_minimum": size["deepspeed"],
        "ratios": beside | loads_beside(load_s),
    }


def cold(root: Path, repeats: int) -> dict[str, object]:
    """Loads of files that are on the device alone, and the device's own speed between them."""
    times: Times = {}
    peer = deepspeed(root / "peer")
    try:
        every = programs(root, peer)
        for program in every:
            if program.save is not None:
                program.save()
        loading = [program for program in every if program.load is not None]
        for turn in range(-1, repeats):
            first = turn % len(loading)
            for program in loading[first:] + loading[:first]:
                program.drop()
                took = timed(program.load)
                if turn >= 0:
                    times.setdefault(program.name, []).append(took)
    finally:
        peer.close()
    device = {"load over raw": over(times, "raw"), "raw over dcp": ratio(times, "dcp", "raw")}
    return {
        "load_gb_per_s": rates(times),
        "slowest_and_fastest_gb_per_s": {n: [NBYTES / max(t) / 1e9, NBYTES / min(t) / 1e9] for n, t in times.items()},
        "ratios": device | loads_beside(times),
    }


def loads_beside(times: Times) -> dict[str, float]:
    """Ratios of the two times of each round; the medians of these."""
    others = [name for name in times if not name.startswith(("ds-ckpt", "raw"))]
    best = min(others, key=lambda name: statistics.median(times[name]))
    return {
        "load over dcp": over(times, "dcp"),
        f"load over the best peer ({best})": over(times, best),
        "other layout over plain load": ratio(times, "ds-ckpt", "ds-ckpt, as two shards each"),
    }


def rates(times: Times) -> dict[str, float]:
    return {n: NBYTES / statistics.median(t) / 1e9 for n, t in times.items()}


def over(times: Times, other: str) -> float:
    """How many times as fast as `other` we are."""
    return ratio(times, other, "ds-ckpt")


def behind(memory: Path, repeats: int) -> dict[str, object]:
    """What a training step notices of a save, and memory over many of them."""
    times = stalls(memory, state(1.0), repeats)
    theirs = "dcp.async_save"
    return {
        "stall_ms": {n: statistics.median(t) * 1e3 for n, t in times.items()},
        "stall_ratios": {f"dcp over {n}": ratio(times, theirs, n) for n in times if n != theirs},
        "memory_bytes_per_save": memory_slope(memory),
    }


PARTS: dict[str, Callable[[Path, Path, int], dict[str, object]]] = {
    "bandwidth": lambda root, _, repeats: bandwidth(root, repeats),
    "cold": lambda root, _, repeats: cold(root, repeats),
    "stall": lambda _, memory, repeats: behind(memory, repeats),
}


def main() -> None:
    parser = records.parser_of("ckpt", None)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--directory", help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    dist.init_process_group("gloo", rank=0, world_size=1)
    fast = "/dev/shm" if os.path.isdir("/dev/shm") else args.directory
    for part in args.parts or PARTS:
        with (
            tempfile.TemporaryDirectory(prefix="bench-ckpt-", dir=args.directory) as root,
            tempfile.TemporaryDirectory(prefix="bench-ckpt-", dir=fast) as memory,
        ):
            found = PARTS[part](Path(root), Path(memory), args.repeats)
        when = {"date": time.strftime("%Y-%m-%d %H:%M"), "repeats": args.repeats}
        records.add("ckpt", state={"tensors": TENSORS, "nbytes": NBYTES}, **{part: when | found})
        print(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
