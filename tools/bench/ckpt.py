"""Saving and loading: bandwidth, stall, bytes, memory, against torch.save, DCP, safetensors and DeepSpeed in one run.

usage: nox -s bench -- ckpt [bandwidth] [cold] [stall] [export] [--directory DIRECTORY] [--repeats N]

All "durable" times end with the bytes on the device (fsync). Cases alternate, medians are reported; the first round warms up.
Loads go into tensors that exist: "bandwidth" loads have their files in the page cache, "cold" ones have not: synced, dropped, and
looked for with mincore before every load, the order of the programs turning by one every round. `raw` is the device: as many
bytes to or from huge pages with O_DIRECT, by the same io_uring engine as ds-ops' own benchmark, and one fsync. Every save makes
new files; those of the turn before are removed outside the timing, for all programs. The state is parameters and Adam's
moments in fp32; DeepSpeed (stage 2, one process, its own environment) adds a second copy of the parameters to its files.
The export is of a model of 4 GB; what comes out is loaded by transformers in an environment of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import peers
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ds_ckpt
from ds_ckpt.convert.tensor_source import TensorEntry, TensorSource, write_checkpoint
from ds_comm.placement import Box, Interval, TensorShard
from ds_ops.io import AsyncIO, IOSettings
from ds_ops.mapped import MappedFile

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "ckpt.json"
WORKERS = ROOT / "tools" / "bench" / "workers"
TENSORS, NUMEL = 120, 1_025_000
# A Llama of 2.07e9 parameters in bf16: 4.1 GB, the largest tensor 164 MB.
HIDDEN, INNER, VOCAB, LAYERS = 2560, 6912, 32000, 24
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


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
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


ALONE = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29556"}


class DeepSpeed:
    """A process in DeepSpeed's environment that saves and loads the same state, and times itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._process = subprocess.Popen(
            [peers.ensure("deepspeed"), WORKERS / "ckpt_deepspeed.py", folder, str(TENSORS // 3), str(NUMEL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ALONE},
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"DeepSpeed's process ended with status {self._process.wait()}")
        return answer

    def run(self, order: str) -> float:
        """`save` or `load`; seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def llama_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        shapes |= {f"{own}self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {f"{own}mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{own}mlp.down_proj.weight": (HIDDEN, INNER), f"{own}input_layernorm.weight": (HIDDEN,)}
        shapes[f"{own}post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes


def export(root: Path) -> dict[str, object]:
    """Write a checkpoint of 4 GB, export it in a process of its own, load the result with transformers."""
    shapes = llama_shapes()
    values = {name: float(i % 200) for i, name in enumerate(shapes)}

    def filled(name: str) -> torch.Tensor:
        return torch.full(shapes[name], values[name], dtype=torch.bfloat16)

    entries = {f"param/{n}": TensorEntry(shape, "bfloat16", lambda n=n: filled(n)) for n, shape in shapes.items()}  # type: ignore[misc]
    write_checkpoint(TensorSource(entries), root / "llama")
    out = root / "exported"
    words = [sys.executable, str(WORKERS / "ckpt_export.py"), str(root / "llama"), str(out)]
    done = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    (out / "config.json").write_text(json.dumps(LLAMA))
    (out / "values.json").write_text(json.dumps(values))
    words = [str(peers.ensure("transformers")), str(WORKERS / "ckpt_transformers.py"), str(out)]
    loaded = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    nbytes = sum(torch.Size(shape).numel() * 2 for shape in shapes.values())
    largest = max(torch.Size(shape).numel() * 2 for shape in shapes.values())
    shutil.rmtree(root / "llama")
    shutil.rmtree(out)
    return {
        "nbytes": nbytes,
        "largest_tensor_bytes": largest,
        "seconds": done["seconds"],
        "memory_bytes": done["peak"] - done["before"],
        "allowed_bytes": 2 * largest + 200_000_000,
        "transformers": loaded,
    }


def saves(root: Path, full: dict[str, torch.Tensor], memory: mmap.mmap) -> dict[str, Callable[[], object]]:
    def torch_save() -> None:
        torch.save(full, root / "torch.pt")
        synced(root / "torch.pt")

    def safetensors_save() -> None:
        save_file(full, root / "st.safetensors")
        synced(root / "st.safetensors")

    return {
        "raw": lambda: raw_write(root / "raw", memory),
        "ds-ckpt": lambda: ds_ckpt.save(root / "runs" / "ours", ds_ckpt.full_shards(full), {}),
        "torch.save": torch_save,
        "safetensors": safetensors_save,
        "dcp": lambda: dcp.save(full, checkpoint_id=root / "dcp"),  # syncs its files by default
    }


def removed(path: Path) -> None:
    """Make room for the next turn."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def loads(root: Path, target: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    def into(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in target.items():
            tensor.copy_(found[name])

    path = root / "runs" / "ours"
    return {
        "ds-ckpt": lambda: ds_ckpt.load(path, ds_ckpt.full_shards(target)),
        "ds-ckpt, as two shards each": lambda: ds_ckpt.load(path, halves(target, 0) + halves(target, 1)),
        "torch.load": lambda: into(torch.load(root / "torch.pt", weights_only=True)),
        "torch.load, mapped": lambda: into(torch.load(root / "torch.pt", weights_only=True, mmap=True)),
        "safetensors": lambda: into(load_file(root / "st.safetensors")),
        "dcp": lambda: dcp.load(target, checkpoint_id=root / "dcp"),
    }


FILES = {
    "raw": "raw",
    "ds-ckpt": "runs",
    "torch.load": "torch.pt",
    "safetensors": "st.safetensors",
    "dcp": "dcp",
    "deepspeed": "peer",
}
WRITTEN = {"raw": "raw", "ds-ckpt": "runs", "torch.save": "torch.pt", "safetensors": "st.safetensors", "dcp": "dcp"}


def files(root: Path, name: str) -> list[Path]:
    """What a load of this name reads."""
    top = root / FILES[name.split(",")[0]]
    return [file for file in [top, *top.rglob("*")] if file.is_file()]


def warm(root: Path, name: str) -> None:
    """Bring the files that a case reads into the page cache."""
    for file in files(root, name):
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def drop(root: Path, name: str) -> None:
    """Drop the files that a case reads from the page cache, and see that they are gone."""
    for file in files(root, name):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # pages that are not written yet would stay
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = MappedFile(file)  # this maps the first page; the others are looked at
        for at in range(2**23, mapped.nbytes, 2**23):
            if mapped.cached(at, 1):
                raise SystemExit(f"{file} stays in the page cache; --directory names a place on a disk")


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


Times = dict[str, list[float]]


def bandwidth(root: Path, repeats: int) -> dict[str, object]:
    """Durable saves, and loads of files in the page cache, of every program in turn."""
    full, target = state(1.0), state(0.0)
    nbytes = sum(t.nbytes for t in full.values())
    memory_of_raw = aligned(nbytes)
    save_s: Times = {}
    load_s: Times = {}
    peer = DeepSpeed(root / "peer")
    try:
        for turn in range(-1, repeats):
            for name, action in saves(root, full, memory_of_raw).items():
                removed(root / WRITTEN[name])
                save_s.setdefault(name, []).append(timed(action))
            removed(root / "peer" / "state")
            save_s.setdefault("deepspeed", []).append(peer.run("save"))
            for name, action in loads(root, target).items():
                warm(root, name)
                load_s.setdefault(name, []).append(timed(action))
            warm(root, "deepspeed")
            load_s.setdefault("deepspeed", []).append(peer.run("load"))
            if turn < 0:  # the first round warms up
                for times in (save_s, load_s):
                    times.clear()
    finally:
        peer.close()
    ours = sum(p.stat().st_size for p in (root / "runs" / "ours").iterdir())
    theirs = sum(p.stat().st_size for p in (root / "peer" / "state").iterdir())
    best = max((n for n in load_s if not n.startswith("ds-ckpt")), key=lambda n: -statistics.median(load_s[n]))
    other = "ds-ckpt, as two shards each"
    return {
        "save_gb_per_s": rates(save_s, nbytes),
        "load_gb_per_s": rates(load_s, nbytes),
        "bytes_over_minimum": ours / nbytes,
        "deepspeed_bytes_over_minimum": theirs / nbytes,
        # Of the two times of each round; the medians of these.
        "ratios": {
            "save over raw": ratio(save_s, "raw"),
            **{f"save over {n}": ratio(save_s, n) for n in ("dcp", "torch.save", "safetensors", "deepspeed")},
            "load over dcp": ratio(load_s, "dcp"),
            f"load over the best peer ({best})": ratio(load_s, best),
            "other layout over plain load": 1 / ratio(load_s, other),
        },
    }


def cold(root: Path, repeats: int) -> dict[str, object]:
    """Loads of files that are on the device alone, and the device's own speed between them."""
    full, target = state(1.0), state(0.0)
    nbytes = sum(t.nbytes for t in full.values())
    memory = aligned(nbytes)
    times: Times = {}
    peer = DeepSpeed(root / "peer")
    try:
        for action in saves(root, full, memory).values():
            action()
        peer.run("save")
        actions: dict[str, Callable[[], object]] = {
            "raw": lambda: raw_read(root / "raw", memory),
            **loads(root, target),
        }
        names = [*actions, "deepspeed"]
        for turn in range(-1, repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                drop(root, name)
                seconds = peer.run("load") if name == "deepspeed" else timed(actions[name])
                if turn >= 0:
                    times.setdefault(name, []).append(seconds)
    finally:
        peer.close()
    peers_ = [name for name in names if not name.startswith(("ds-ckpt", "raw"))]
    best = min(peers_, key=lambda name: statistics.median(times[name]))
    other = "ds-ckpt, as two shards each"
    return {
        "load_gb_per_s": rates(times, nbytes),
        "slowest_and_fastest_gb_per_s": {n: [nbytes / max(t) / 1e9, nbytes / min(t) / 1e9] for n, t in times.items()},
        "ratios": {
            "load over raw": ratio(times, "raw"),
            "raw over dcp": ratio(times, "dcp", "raw"),
            "load over dcp": ratio(times, "dcp"),
            f"load over the best peer ({best})": ratio(times, best),
            "other layout over plain load": 1 / ratio(times, other),
        },
    }


def rates(times: Times, nbytes: int) -> dict[str, float]:
    return {n: nbytes / statistics.median(t) / 1e9 for n, t in times.items()}


def ratio(times: Times, other: str, ours: str = "ds-ckpt") -> float:
    """How many times as fast as `other` we are."""
    return statistics.median(b / a for a, b in zip(times[ours], times[other], strict=True))


def behind(memory: Path, repeats: int) -> dict[str, object]:
    """What a training step notices of a save, and memory over many of them."""
    times = stalls(memory, state(1.0), repeats)
    theirs = "dcp.async_save"
    return {
        "stall_ms": {n: statistics.median(t) * 1e3 for n, t in times.items()},
        "stall_ratios": {f"dcp over {n}": ratio(times, theirs, n) for n in times if n != theirs},
        "memory_bytes_per_save": memory_slope(memory),
    }


PARTS = ("bandwidth", "cold", "stall", "export")


def main(parts: Sequence[str], where: str | None, repeats: int) -> int:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    dist.init_process_group("gloo", rank=0, world_size=1)
    root = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir=where))
    memory = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir="/dev/shm" if os.path.isdir("/dev/shm") else where))
    found = json.loads(DATA.read_text()) if DATA.exists() else {}
    try:
        for part in parts:
            body = {"date": time.strftime("%Y-%m-%d %H:%M"), "repeats": repeats}
            folder = root / part
            folder.mkdir()
            if part == "bandwidth":
                found[part] = {**body, **bandwidth(folder, repeats)}
            elif part == "cold":
                found[part] = {**body, **cold(folder, repeats)}
            elif part == "stall":
                found[part] = {**body, **behind(memory, repeats)}
            else:
                found[part] = {"date": body["date"], **export(folder)}
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
        dist.destroy_process_group()
    found["machine"] = {"system": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__}
    found["state"] = {"tensors": TENSORS, "nbytes": TENSORS * NUMEL * 4}
    result = {key: found[key] for key in ("machine", "state", *PARTS) if key in found}
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}; all without one")
    arguments.add_argument("--directory", help="on the disk to measure")
    arguments.add_argument("--repeats", type=int, default=5)
    chosen = arguments.parse_args()
    sys.exit(main(chosen.parts, chosen.directory, chosen.repeats))
