"""Train a small GPT on Python's standard library: an ordinary training script, with one `initialize`.

ds run --nproc 2 train.py --deepspeed_config ds_config.json --checkpoints ckpt
ds run --nproc 1 train.py --deepspeed_config ds_config.json --checkpoints ckpt --resume --steps 170 --sample 400
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from data import Blocks, read_text, unigram_entropy
from model import GPT, GPTConfig, generate

import ds_engine
import ds_monitor
from ds_config.errors import DsError
from ds_monitor import ProgressSink
from ds_monitor.metric_names import TOKENS

PROMPT = b"def read(self, size"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The script's own arguments and those of every DeepSpeed script."""
    parser = ds_engine.add_config_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--steps", type=int, default=150, help="train until this step (default 150)")
    parser.add_argument("--checkpoints", default="checkpoints", help="directory to save in (default checkpoints)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--sample", type=int, default=0, metavar="BYTES", help="generate so many bytes at the end")
    parser.add_argument("--data", type=Path, help="folder of .py files (default: the standard library)")
    parser.add_argument("--validation", type=int, default=16, metavar="BATCHES", help="batches to validate on")
    parser.add_argument("--result", type=Path, help="write losses and the sample to this JSON file")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Train, validate, save, sample."""
    torch.manual_seed(0)
    train_text, valid_text = read_text(args.data)
    size = GPTConfig()
    engine, _, loader, _ = ds_engine.initialize(
        args=args, model=GPT(size), training_data=Blocks(train_text, size.context)
    )
    lead, ranks = engine.mesh.rank == 0, engine.mesh["world"].size
    if lead:
        print(engine.plan, flush=True)
    if args.resume:
        path, _ = engine.load_checkpoint(args.checkpoints)
        if lead:
            print(f"resumed from {path} at step {engine.global_steps} on {ranks} rank(s)", flush=True)
    ds_monitor.attach([ProgressSink(args.steps, first_step=engine.global_steps)] if lead else [])

    while engine.global_steps < args.steps:
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            ds_monitor.counter(TOKENS, batch[:, 1:].numel() * ranks)
            if engine.global_steps >= args.steps:
                break

    held_out = engine.deepspeed_io(Blocks(valid_text, size.context), batch_size=16 // ranks, route="eval")
    validation = engine.eval_batch(iter(held_out), min(args.validation, len(held_out)))
    ds_monitor.gauge("Validation/loss", validation)
    path = engine.save_checkpoint(args.checkpoints)
    sample = generate(engine, PROMPT, args.sample).decode(errors="replace") if args.sample else ""
    ds_monitor.shutdown()
    entropy = unigram_entropy(valid_text)
    if lead:
        print(
            f"step {engine.global_steps}: validation loss {validation:.3f} nats a byte, unigram entropy {entropy:.3f}"
        )
        print(f"checkpoint {path}")
        if sample:
            print(f"--- sample ---\n{sample}\n--------------")
        if args.result:
            result = {
                "step": engine.global_steps,
                "ranks": ranks,
                "validation_loss": validation,
                "unigram_entropy": entropy,
                "checkpoint": path,
                "sample": sample,
            }
            args.result.write_text(json.dumps(result))
    engine.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(arguments()))
    except (DsError, FileNotFoundError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
