"""`nox -s bench -- moe_grouped`: experts of one rank by grouped products beside one expert after the other, and beside DeepSpeed's layer's way.

Forward and backward of `MoE` on one rank, answers compared first. The engines take turns in one process; a ratio is the median over rounds of (their
time / ours). "padded" is the way of DeepSpeed's layer and GShard: one-hot products into [E, capacity, n], with the capacity that drops nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ds_moe import MoE, MoEOptions

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "moe_grouped.json"
SHAPES = [(8, 128, 256, 512), (64, 128, 256, 512), (64, 64, 64, 512)]  # experts, hidden, inner, tokens


def layers(experts: int, hidden: int, inner: int) -> tuple[MoE, MoE]:
    """The layer that loops and the one that has grouped products, with one set of values."""
    mlp = nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))
    pair = [
        MoE(hidden, mlp, experts, k=2, drop_tokens=False, top2_2nd_expert_sampling=False,
            options=MoEOptions(grouped=grouped, draw_apart=True))
        for grouped in (False, True)
    ]  # fmt: skip
    pair[1].load_state_dict(pair[0].state_dict())
    return pair[0], pair[1]


def padded(layer: MoE, x: Tensor) -> Tensor:
    """Compute the layer by one-hot products, as GShard writes them down."""
    inner = layer.deepspeed_moe
    routed = inner.gate(x)
    count, capacity = routed.num_experts, int(routed.counts.max())
    chosen = nn.functional.one_hot(routed.experts.t().reshape(-1), count)
    place = (chosen.cumsum(0) * chosen).sum(1) - 1
    slots = nn.functional.one_hot(routed.experts.t().reshape(-1) * capacity + place, count * capacity).float()
    slots = slots.view(2, len(x), -1)
    rows = (slots.sum(0).t() @ x).view(count, capacity, -1)
    outs = torch.cat([expert(part) for expert, part in zip(inner.experts.deepspeed_experts, rows, strict=True)])
    return (slots * routed.weights.t()[..., None]).sum(0) @ outs


def step(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    begun = time.perf_counter()
    forward(x).square().mean().backward()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = []
    for experts, hidden, inner, tokens in SHAPES:
        torch.manual_seed(0)
        loop, grouped = layers(experts, hidden, inner)
        x = torch.randn(tokens, hidden)
        engines: dict[str, Callable[[Tensor], Tensor]] = {
            "grouped": lambda x, m=grouped: m(x)[0], "loop": lambda x, m=loop: m(x)[0], "padded": lambda x, m=loop: padded(m, x),
        }  # fmt: skip
        outs = {name: forward(x).detach() for name, forward in engines.items()}
        alike = all(torch.allclose(out, outs["loop"], atol=1e-5, rtol=1e-4) for out in outs.values())
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds + 1):
            for name, forward in engines.items():
                times[name].append(step(forward, x))
        took = {name: 1e3 * statistics.median(each[1:]) for name, each in times.items()}
        for theirs in ("loop", "padded"):
            ratio = statistics.median(b / a for a, b in zip(times["grouped"][1:], times[theirs][1:], strict=True))
            title = f"{experts} experts, {hidden} x {inner}, {tokens} tokens"
            print(
                f"{title}: grouped {took['grouped']:.2f} ms, {ratio:.2f}x {theirs}{'' if alike else ', DIFFER'}",
                flush=True,
            )
            lines.append({"config": title, "ranks": 1, "ours": "grouped", "theirs": theirs, "ratio": ratio,
                          "ms": [took["grouped"], took[theirs]], "alike": alike})  # fmt: skip
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, torch {torch.__version__}"
    DATA.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
