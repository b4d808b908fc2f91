"""The whole story in one command: train on two ranks, save, resume on one, generate text, and judge the result.

    python quickstart.py [--out FOLDER] [--steps N]

Exits 0 only when every part worked and the model clearly beats knowing how often each byte occurs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ds_monitor.plot import Curve, plot_curves, read_curve

HERE = Path(__file__).resolve().parent
CLEARLY = 0.85  # of the unigram entropy


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Where to write, how long to train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), help="output folder (default runs/quickstart)"
    )
    parser.add_argument("--steps", type=int, default=150, help="steps on two ranks (default 150)")
    parser.add_argument("--more", type=int, default=15, help="steps after the resume on one rank (default 15)")
    parser.add_argument("--config", type=Path, default=HERE / "ds_config.json", help="configuration")
    return parser.parse_args(argv)


def train(args: argparse.Namespace, ranks: int, steps: int, *extra: str) -> dict[str, Any]:
    """Run train.py on so many ranks, in the output folder; what it wrote as its result.

    Raises:
        SystemExit: it failed; its own message is on the screen.
    """
    result = args.out / f"result-{ranks}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ds_launcher", "run", "--nproc", str(ranks), str(HERE / "train.py")]
    command += [
        "--deepspeed_config",
        str(args.config.resolve()),
        "--steps",
        str(steps),
        "--result",
        result.name,
        *extra,
    ]
    # One thread a rank: the ranks share the cores of this machine.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(command, cwd=args.out, env={**os.environ, "OMP_NUM_THREADS": threads}, check=False)
    if done.returncode or not result.is_file():
        raise SystemExit(f"quickstart: training on {ranks} rank(s) failed with exit code {done.returncode}")
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def parts(whole: Curve, more: int) -> list[Curve]:
    """Return the curve before and after the resume; the second begins at the last point of the first."""
    end = len(whole.x) - more
    return [
        Curve("on 2 ranks", whole.x[:end], whole.y[:end]),
        Curve("resumed on 1 rank", whole.x[end - 1 :], whole.y[end - 1 :]),
    ]


def main(args: argparse.Namespace) -> int:
    """All parts, and the verdict."""
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    for made in ("metrics", "tensorboard", "checkpoints"):  # by an earlier run
        shutil.rmtree(args.out / made, ignore_errors=True)
    print(f"== 1/3  train {args.steps} steps on 2 ranks", flush=True)
    first = train(args, 2, args.steps)
    print(f"\n== 2/3  resume on 1 rank for {args.more} steps, then generate", flush=True)
    second = train(args, 1, args.steps + args.more, "--resume", "--sample", "300")
    print("\n== 3/3  loss curve", flush=True)
    whole = read_curve(next((args.out / "metrics").glob("*train_loss*.csv")))
    picture = plot_curves(
        parts(whole, args.more), args.out / "loss.png", title="train_gpt", xlabel="samples", ylabel="loss, nats a byte"
    )
    print(picture)
    went_on = second["step"] == args.steps + args.more and second["sample"]
    entropy, losses = first["unigram_entropy"], (first["validation_loss"], second["validation_loss"])
    learned = all(loss < CLEARLY * entropy for loss in losses)
    print(
        f"""
== summary
   unigram entropy             {entropy:.3f} nats a byte (what knowing the frequency of every byte gives)
   validation loss, 2 ranks    {losses[0]:.3f} at step {first["step"]}
   validation loss, 1 rank     {losses[1]:.3f} at step {second["step"]}, after the resume
   metrics, TensorBoard        {args.out / "metrics"}, {args.out / "tensorboard"}
   loss curve, checkpoints     {picture}, {args.out / "checkpoints"}
   time                        {time.monotonic() - began:.0f} s
   {"OK" if learned and went_on else "FAILED: the loss is not clearly below the unigram entropy"}"""
    )
    return 0 if learned and went_on else 1


if __name__ == "__main__":
    sys.exit(main(arguments()))
