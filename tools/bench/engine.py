"""What ds-engine costs: a step beside a bare loop with the same optimizer, `initialize` beside DeepSpeed's, a 70 B plan.

usage: nox -s bench -- engine [ROUNDS]

Steps: two ranks with one thread each train the quickstart's model (6.3 M parameters, stage 2, two microbatches); bare loop,
three-call loop and `train_batch` take turns in the same processes, and ratios are those of neighbouring steps.
`initialize`: fresh processes, ours and DeepSpeed's in turn. Plan: `ds plan` of a 70 B model for 1024 ranks, whole process.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import ensure

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "benchmarks" / "data" / "engine.json"
WORKER = Path(__file__).parent / "workers" / "engine.py"
DECODER = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def ranks(python: str, *arguments: str, world: int) -> dict:
    """What rank 0 of a fresh job printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    jobs = [
        subprocess.Popen(
            [python, str(WORKER), *arguments], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(world)
    ]  # fmt: skip
    outs = [job.communicate(timeout=300) for job in jobs]
    lines = [line for line in outs[0][0].splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{arguments} failed: {outs[0][1][-2000:]}")
    return json.loads(lines[-1])


def plan_cost() -> dict[str, float]:
    """Seconds of processor time, wall seconds and peak bytes of `ds plan` with a 70 B model on 1024 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        model, config = Path(folder) / "config.json", Path(folder) / "ds.json"
        model.write_text(json.dumps(DECODER))
        settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        config.write_text(json.dumps(settings))
        ds = str(Path(sys.executable).with_name("ds"))
        before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        code = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        command = [sys.executable, "-c", code, ds, "plan", str(config), "--world", "1024", "--model", str(model)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - since, "cpu_s": cpu, "peak_mb": int(done.stdout) / 1024}


def main(rounds: int = 12) -> int:
    steps = ranks(sys.executable, "pair", str(rounds), world=2)
    starts: dict[str, list[dict]] = {"ds_engine": [], "deepspeed": []}
    for _ in range(3):
        for package, found in starts.items():
            python = sys.executable if package == "ds_engine" else str(ensure("deepspeed"))
            found.append(ranks(python, "init", package, world=1))
    init = {
        name: {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
        for name, found in starts.items()
    }
    plan = {key: round(value, 2) for key, value in plan_cost().items()}
    for name, ms in steps["step_ms"].items():
        print(f"{name:<22} {ms:8.1f} ms a step   {100 * (steps['ratios'][name] - 1):+.1f} %")
    for name, row in init.items():
        print(
            f"{name:<22} import {row['import_s']:.2f} s, initialize {row['initialize_s']:.2f} s, first step {row['first_step_s']:.2f} s"
        )
    print(f"initialize, ours / DeepSpeed: {init['ds_engine']['initialize_s'] / init['deepspeed']['initialize_s']:.2f}")
    print(
        f"ds plan, 70 B on 1024 ranks: {plan['wall_s']:.1f} s ({plan['cpu_s']:.1f} s of processor time), {plan['peak_mb']:.0f} MB"
    )
    machine = {"python": platform.python_version(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    DATA.write_text(json.dumps({**machine, "steps": steps, "initialize": init, "plan": plan}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
