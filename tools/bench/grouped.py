"""`nox -s bench -- grouped`: grouped products beside a plain loop with cat and torch's own; products with quantized weights.

All run in one process and answer in turn; a ratio is the median over rounds of (their time / ours), a time the best round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ds_ops.formats import INT4, INT8
from ds_ops.grouped import grouped_matmul
from ds_ops.quant_linear import quantize_weight, quantized_linear


def ends_of(rows: int, experts: int, zipf: bool) -> Tensor:
    """Rows drawn for experts, alike or by Zipf's law (exponent 1)."""
    odds = 1 / torch.arange(1, experts + 1).float() if zipf else torch.ones(experts)
    drawn = torch.multinomial(odds, rows, replacement=True, generator=torch.Generator().manual_seed(0))
    return torch.bincount(drawn, minlength=experts).cumsum(0)


def plain_loop(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(itertools.pairwise(bounds))])


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        times[name].clear()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def line(title: str, times: dict[str, list[float]]) -> str:
    ours, *others = times
    ratios = (
        f"{statistics.median(b / a for a, b in zip(times[ours], times[o], strict=True)):.2f}x {o}"
        f" (best {min(times[o]) / min(times[ours]):.2f}x)"
        for o in others
    )
    return f"{title:44} {1e3 * min(times[ours]):8.2f} ms | {', '.join(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in (torch.float32, torch.bfloat16):
        for experts in (8, 64):
            for zipf in (False, True):
                x, w = torch.randn(2048, 512).to(dtype), torch.randn(experts, 512, 1024).to(dtype)
                ends = ends_of(2048, experts, zipf)
                calls: dict[str, Callable[[], object]] = {
                    "ours": lambda x=x, w=w, e=ends: grouped_matmul(x, w, e),
                    "loop": lambda x=x, w=w, e=ends: plain_loop(x, w, e),
                    "torch": lambda x=x, w=w, e=ends: torch._grouped_mm(x, w, offs=e.to(torch.int32)),
                }
                title = f"{str(dtype)[6:]} E={experts} {'Zipf' if zipf else 'balanced'}"
                print(line(title, in_turn(calls, args.rounds)), flush=True)
    weight = torch.randn(4096, 4096) / 64
    for kind in (INT8, INT4):
        q, half = quantize_weight(weight, kind), weight.bfloat16()
        for tokens in (1, 8, 64):
            x = torch.randn(tokens, 4096)
            narrow = x.bfloat16()
            calls = {
                "ours": lambda x=x, q=q: quantized_linear(x, q),
                "ours of bf16": lambda x=narrow, q=q: quantized_linear(x, q),
                "fp32": lambda x=x: torch.nn.functional.linear(x, weight),
                "bf16": lambda x=narrow, h=half: torch.nn.functional.linear(x, h),
            }
            print(line(f"{kind.name} 4096 x 4096, {tokens} tokens", in_turn(calls, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
