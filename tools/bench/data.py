"""`nox -s bench -- data`: packed sequences beside torch's DataLoader, the first batch, and the analyzer beside DeepSpeed's.

Loaders read the same token file in the page cache, alternating in one process; a share is the median of pairwise ratios. The
analyzers measure the same samples (rows of that file) with the same function and batch, each in its own environment.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from in_turn import Answering, in_turn, ratio
from meetings import WORKERS
from peers import ensure
from torch.utils.data import DataLoader, Dataset

from ds_data import PackedSequences, RankBatchSampler, RankSlice, SampleStream, TokenFile, TokenLoader, TokenWriter

LENGTH, MICRO, TOKENS = 1024, 8, 1 << 26


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


def analysis(python: str, which: str, samples: int) -> float:
    """Seconds of map and reduce."""
    with tempfile.TemporaryDirectory() as folder:
        worker = Answering([python, WORKERS / "data_analyzer.py", which, samples, folder], OMP_NUM_THREADS="1")
        worker.close()
    return float(worker.first)


def main() -> None:
    args = records.parser_of("data", __doc__, cycles=7, batches=200, samples=1_000_000).parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder) / "corpus")
        measures = {name: lambda start=start: rate(start(), args.batches) for name, start in loaders(file).items()}
        found = in_turn(measures, args.cycles, warm_up=False)
        for name, rates in found.items():
            faster = ratio(found, "TokenLoader", name)
            lines.append({"what": name, "tokens_s": statistics.median(rates), "times": faster})
            print(f"{name:36} {statistics.median(rates) / 1e6:8.1f} M tokens/s   TokenLoader: {faster:.2f}x")
        firsts = [first_batch(TokenFile(Path(folder) / "corpus")) for _ in range(args.cycles)]
        print(f"first batch: {statistics.median(firsts) * 1e3:.2f} ms")
        lines.append({"what": "first batch", "ms": statistics.median(firsts) * 1e3})
        pythons = {"ours": sys.executable, "deepspeed": str(ensure("deepspeed"))}
        analyzers = {which: partial(analysis, python, which, args.samples) for which, python in pythons.items()}
        times = in_turn(analyzers, 2, warm_up=False)
        faster = ratio(times, "deepspeed", "ours")
        print(f"analyzer, {args.samples:,} samples: {times['ours']} s, DeepSpeed {times['deepspeed']} s: {faster:.2f}x")
        lines.append({"what": "analyzer", "samples": args.samples, "seconds": times, "times": faster})
    records.write("data", lines=lines)


if __name__ == "__main__":
    main()
