"""Pipelines: what a schedule makes of four ranks whose kernels sleep, and two stages of real models, beside torch and DeepSpeed.

Eight microbatches. Engines take turns: those that sleep live in the same four processes, those that compute are sets of ranks of their own.
"""

from __future__ import annotations

import statistics

import records
import tables
import torch
from in_turn import in_turn, seconds
from meetings import Met, answer_of
from quiet import Watch
from torch import nn

import ds_pipe

RANKS, MICROBATCHES, PASS_MS = 4, 8, 8.0
ENGINES = ["ours:1f1b", "ours:zb-h1", "ours:zbv", "torch:1f1b", "torch:interleaved-zb", "torch:zbv"]
REAL = ["ours@shm:1f1b", "ours:1f1b", "ours@shm:zb-h1", "torch:1f1b", "deepspeed", "alone"]


def stages(config: str, cycles: int, steps: int) -> dict[str, dict]:
    """Two stages of a real model: of each engine the median step, and beside DeepSpeed's of the same moment."""
    return Met("pipe_real", REAL, [config], cycles, steps).rows("deepspeed", computes_less=["alone"])


def action_us(microbatches: int = 64, rounds: int = 15) -> float:
    """Microseconds that running an action costs: a step of one stage and a plain loop over the same layer take turns.

    The model is one small layer; what the step takes longer than the loop is divided by its actions (a forward and a backward a
    microbatch). Medians.
    """
    model = ds_pipe.PipelineModule([nn.Linear(1, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    step, layer = ds_pipe.pipeline(model, microbatches), nn.Linear(1, 1)
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * microbatches

    def loop() -> None:
        for x, y in data:
            (nn.functional.mse_loss(layer(x), y) / microbatches).backward()

    times = in_turn({"step": lambda: seconds(lambda: step(data)), "loop": lambda: seconds(loop)}, rounds)
    step.close()
    ours, plain = (statistics.median(times[name]) for name in ("step", "loop"))
    return 1e6 * (ours - plain) / (2 * microbatches)


def main() -> None:
    args = records.parser_of("pipe", __doc__, cycles=5, steps=4).parse_args()
    watch = Watch()
    found = answer_of("pipe", ",".join(ENGINES), args.cycles, args.steps, ranks=RANKS)
    ideal_ms = 3 * PASS_MS * MICROBATCHES
    lines = []
    for engine, times in found.items():
        ms, best = statistics.median(times), min(times)
        lines.append({"engine": engine, "ms": ms, "best_ms": best, "efficiency": ideal_ms / ms})
    cost = action_us()
    real = {config: stages(config, 2 * args.cycles, args.steps) for config in ("gpt", "small")}
    records.write("pipe", others=watch.others(), ideal_ms=ideal_ms, action_us=cost, lines=lines, stages=real)
    tables.fill("pipe")


if __name__ == "__main__":
    main()
