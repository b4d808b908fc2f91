"""`nox -s bench -- optimizers`: time and bytes of optimizers with small states, beside torch.optim and, where installed, torchao and bitsandbytes.

Every optimizer steps its own copy of one parameter list; they take turns in one process. A ratio is the median over rounds of (their time /
AdamW's of ds-ops). With one thread it is the processor's time that counts, so that other work on the machine does not. Bytes are those of all state tensors for an element.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_ops.optim import Adafactor, AdamW, AdamW8bit

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "optimizers.json"
SHAPES = [(1024, 1024)] * 7 + [(1024,)] * 16
Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def peers() -> dict[str, Maker]:
    """Return the optimizers of other libraries that this environment has."""
    makers: dict[str, Maker] = {
        "torch AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "torch Adafactor": torch.optim.Adafactor,
    }
    for name, module in (("torchao AdamW8bit", "torchao.optim"), ("bitsandbytes AdamW8bit", "bitsandbytes.optim")):
        try:
            makers[name] = importlib.import_module(module).AdamW8bit
        except ImportError:
            print(f"{name}: not installed")
    return makers


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of state for an element; torchao's tensors count what they are made of."""

    def size(t: Any) -> int:
        parts = [t.codes, t.scale] if hasattr(t, "codes") else [t]
        return sum(part.numel() * part.element_size() for part in parts)

    states = [v for s in optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor) and "qmap" not in k]
    return sum(map(size, states)) / sum(p.numel() for g in optimizer.param_groups for p in g["params"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    makers: dict[str, Maker] = {
        "AdamW": AdamW,
        "AdamW, states in bf16": lambda p: AdamW(p, state_dtype=torch.bfloat16),
        "AdamW, amsgrad": lambda p: AdamW(p, amsgrad=True),
        "AdamW8bit": AdamW8bit,
        "Adafactor": Adafactor,
        **peers(),
    }
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, make in makers.items():
        stepped = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        for p in stepped:
            p.grad = torch.randn_like(p)
        try:
            optimizer = make(stepped)
            optimizer.step()
            optimizers[name] = optimizer
        except Exception as error:  # a peer that does not run on this machine is said, not measured
            print(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.rounds):
        for name, optimizer in optimizers.items():
            begun = clock()
            optimizer.step()
            times[name].append(clock() - begun)
    lines = []
    for name, optimizer in optimizers.items():
        ratio = statistics.median(t / a for t, a in zip(times[name], times["AdamW"], strict=True))
        lines.append({"optimizer": name, "ms": 1e3 * statistics.median(times[name]), "of_adamw": ratio,
                      "state_bytes": state_bytes(optimizer)})  # fmt: skip
        print(f"{name}: {lines[-1]['ms']:.1f} ms, {ratio:.1f}x AdamW, {lines[-1]['state_bytes']:.2f} bytes an element")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, torch {torch.__version__}"
    DATA.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
