"""`nox -s bench -- data`: packed sequences beside torch's DataLoader, the first batch, and the analyzer beside DeepSpeed's.

Loaders read the same token file in the page cache, alternating in one process; a share is the median of pairwise ratios. The
analyzers measure the same samples (rows of that file) with the same function and batch, each in its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import ensure
from torch.utils.data import DataLoader, Dataset

from ds_data import PackedSequences, RankBatchSampler, RankSlice, SampleStream, TokenFile, TokenLoader, TokenWriter

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks" / "data" / "data.json"
LENGTH, MICRO, TOKENS = 1024, 8, 1 << 26
WORKER = Path(__file__).parent / "workers" / "data_analyzer.py"


class ByHand(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a training script has: inputs and labels out of a memory map, nothing about documents."""

    def __init__(self, file: TokenFile) -> None:
        self.values = file.values

    def __len__(self) -> int:
        return (len(self.values) - 1) // LENGTH

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(self.values[at * LENGTH : at * LENGTH + LENGTH + 1].astype(np.int64))
        return row[:-1], row[1:]


def written(path: Path) -> TokenFile:
    """Documents of 1 to 2,000 tokens."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, np.uint16) as out:
        left = TOKENS
        while left > 0:
            sizes = rng.integers(1, 2000, 4096)
            out.add_flat(rng.integers(0, 50000, int(sizes.sum()), dtype=np.uint16), sizes)
            left -= int(sizes.sum())
    return TokenFile(path)


def rate(stream: Iterator[Any], batches: int) -> float:
    """Tokens a second of so many batches; the first one is not counted."""
    next(stream)
    begun = time.perf_counter()
    got = sum(1 for _ in islice(stream, batches))
    return got * MICRO * LENGTH / (time.perf_counter() - begun)


def loaders(file: TokenFile) -> dict[str, Callable[[], Iterator[Any]]]:
    data, lane = PackedSequences(file, LENGTH), RankSlice(0, 1, MICRO)
    rows = RankBatchSampler(SampleStream(len(data)), lane, range(0, len(data) // MICRO * MICRO, MICRO))
    return {
        "TokenLoader": lambda: iter(TokenLoader(data, lane)),
        "DataLoader(0), same sequences": lambda: iter(DataLoader(data, batch_sampler=rows)),
        "DataLoader(2), same sequences": lambda: iter(DataLoader(data, batch_sampler=rows, num_workers=2)),
        "DataLoader(0), inputs and labels": lambda: iter(DataLoader(ByHand(file), MICRO, shuffle=True)),
        "DataLoader(2), inputs and labels": lambda: iter(DataLoader(ByHand(file), MICRO, shuffle=True, num_workers=2)),
    }


def first_batch(file: TokenFile) -> float:
    """Seconds from nothing but an open file to the first batch."""
    begun = time.perf_counter()
    stream = iter(TokenLoader(PackedSequences(file, LENGTH), RankSlice(0, 1, MICRO)))
    next(stream)
    took = time.perf_counter() - begun
    stream.close()  # type: ignore[attr-defined]
    return took


def analysis(python: str, which: str, samples: int, folder: Path) -> float:
    """Seconds of map and reduce."""
    command = [python, str(WORKER), which, str(samples), str(folder)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder) / "corpus")
        made = loaders(file)
        found: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(args.cycles):
            for name, start in made.items():
                found[name].append(rate(start(), args.batches))
        ours = found["TokenLoader"]
        for name, rates in found.items():
            ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
            lines.append({"what": name, "tokens_s": statistics.median(rates), "times": ratio})
            print(f"{name:36} {statistics.median(rates) / 1e6:8.1f} M tokens/s   TokenLoader: {ratio:.2f}x")
        firsts = [first_batch(TokenFile(Path(folder) / "corpus")) for _ in range(args.cycles)]
        print(f"first batch: {statistics.median(firsts) * 1e3:.2f} ms")
        lines.append({"what": "first batch", "ms": statistics.median(firsts) * 1e3})
        times: dict[str, list[float]] = {"ours": [], "deepspeed": []}
        for cycle in range(2):
            for which, python in (("ours", sys.executable), ("deepspeed", str(ensure("deepspeed")))):
                times[which].append(analysis(python, which, args.samples, Path(folder) / f"{which}{cycle}"))
        ratio = statistics.median(b / a for a, b in zip(times["ours"], times["deepspeed"], strict=True))
        print(f"analyzer, {args.samples:,} samples: {times['ours']} s, DeepSpeed {times['deepspeed']} s: {ratio:.2f}x")
        lines.append({"what": "analyzer", "samples": args.samples, "seconds": times, "times": ratio})
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    OUT.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
