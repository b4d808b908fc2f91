"""`nox -s bench -- curriculum`: does the quickstart's model need fewer tokens when short sequences come first?

One process trains it on all tokens, and with lengths that grow on a share of them; the schedule of the rate is stretched to each run's
steps. Validation is on whole sequences. Two seeds each; what is compared is the mean of the final validation losses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ds_engine
from ds_data import make_schedule

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "train_gpt"
OUT = ROOT / "docs" / "benchmarks" / "data" / "curriculum.json"
sys.path.insert(0, str(EXAMPLE))
from data import Blocks, read_text  # type: ignore[import-not-found]  # noqa: E402
from model import GPT, GPTConfig  # type: ignore[import-not-found]  # noqa: E402


def lengths(tokens: int, batch: int, context: int, growth: float, low: int) -> list[int]:
    """Length of the sequences at each step, until `tokens` are used; it grows over a share of them."""
    grows = max(1, int(growth * tokens / (batch * (low + context) / 2)))
    schedule = make_schedule("fixed_linear", low, context, {"total_curriculum_step": grows, "difficulty_step": 8})
    out: list[int] = []
    while sum(out) * batch < tokens:
        out.append(context if growth == 0 else schedule(len(out) + 1))
    return out


def train(seed: int, steps: list[int], batch: int, validation: int) -> float:
    torch.manual_seed(seed)
    size = GPTConfig()
    text, held_out = read_text(None)
    config: dict[str, Any] = {
        "train_batch_size": batch, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "data_efficiency": {"seed": seed},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {
            "warmup_num_steps": max(2, len(steps) // 10), "warmup_type": "linear", "total_num_steps": len(steps), "cos_min_ratio": 0.1}},
    }  # fmt: skip
    engine, _, loader, _ = ds_engine.initialize(
        model=GPT(size), config=config, training_data=Blocks(text, size.context)
    )
    loader.post_process = lambda rows, told: rows[:, : steps[told["consumed_samples"] // batch - 1] + 1]
    for _ in steps:
        engine.train_batch()
    held = engine.deepspeed_io(Blocks(held_out, size.context), batch_size=16, route="eval")
    loss = engine.eval_batch(iter(held), min(validation, len(held)))
    engine.close()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    context, batch = GPTConfig().context, 16
    every = args.steps * batch * context
    runs = {"all lengths": (1.0, 0.0, context), "short first": (0.9, 0.4, 64), "short first, faster": (0.9, 0.2, 32)}
    lines = []
    for name, (share, growth, low) in runs.items():
        plan = lengths(int(share * every), batch, context, growth, low)
        begun = time.perf_counter()
        losses = [train(seed, plan, batch, 16) for seed in range(args.seeds)]
        seconds = (time.perf_counter() - begun) / args.seeds
        mean = sum(losses) / len(losses)
        lines.append(
            {
                "what": name,
                "tokens": sum(plan) * batch,
                "steps": len(plan),
                "losses": losses,
                "mean": mean,
                "seconds": seconds,
            }
        )
        print(
            f"{name:22} {sum(plan) * batch:>9,} tokens in {len(plan)} steps: {mean:.4f} nats a byte {losses}, {seconds:.0f} s"
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    OUT.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
