"""What ds-engine costs: a step beside a bare loop with the same optimizer, `initialize` beside DeepSpeed's, a 70 B plan.

usage: nox -s bench -- engine [ROUNDS]

Steps: two ranks with one thread each train the quickstart's model (6.3 M parameters, stage 2, two microbatches); bare loop,
three-call loop and `train_batch` take turns in the same processes, and ratios are those of neighbouring steps.
`initialize`: fresh processes, ours and DeepSpeed's in turn, on one rank and on two; with bytecode from a turn that is not
counted, as installed packages have it. Ours imports most of itself in `initialize`, DeepSpeed in `import`: both are told.
Plan: `ds plan` of a 70 B model for 1024 ranks, whole process.
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


def ranks(python: str, *arguments: str, world: int, bytecode: str = "") -> dict:
    """What rank 0 of a fresh job printed. `bytecode`: folder where modules are compiled to; "" as this process does it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    if bytecode:
        env |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
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
        command = [sys.executable, "-c", code, ds, "plan", str(config), "--world-size", "1024", "--model", str(model)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - since, "cpu_s": cpu, "peak_mb": int(done.stdout) / 1024}


def start_cost(world: int, turns: int = 5) -> dict[str, dict[str, float]]:
    """Median seconds of import, initialize and first step, ours and DeepSpeed's, and of each turn's ratio."""
    found: dict[str, list[dict]] = {"ds_engine": [], "deepspeed": []}
    bytecode = str(
        ROOT / ".nox" / "bytecode"
    )  # kept: compiling torch's compiler, which DeepSpeed imports, takes minutes
    for turn in range(turns + 1):
        for package, rows in found.items():
            python = sys.executable if package == "ds_engine" else str(ensure("deepspeed"))
            row = ranks(python, "init", package, world=world, bytecode=bytecode)
            if turn:
                rows.append(row)
    medians = {
        name: {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
        for name, rows in found.items()
    }
    pairs = list(zip(found["ds_engine"], found["deepspeed"], strict=True))
    ratios = {
        "initialize": statistics.median(a["initialize_s"] / b["initialize_s"] for a, b in pairs),
        "import_and_initialize": statistics.median(
            (a["import_s"] + a["initialize_s"]) / (b["import_s"] + b["initialize_s"]) for a, b in pairs
        ),
        "processor_until_made": statistics.median(
            a["processor_until_made_s"] / b["processor_until_made_s"] for a, b in pairs
        ),
    }
    return {**medians, "ratios": {name: round(value, 3) for name, value in ratios.items()}}


def main(rounds: int = 24, turns: int = 5) -> int:
    init = {str(world): start_cost(world, turns) for world in (1, 2)}
    plan = {key: round(value, 2) for key, value in plan_cost().items()}
    steps = ranks(sys.executable, "pair", str(rounds), world=2)
    for name, ms in steps["step_ms"].items():
        over, busy = (100 * (steps[key][name] - 1) for key in ("ratios", "processor_ratios"))
        print(f"{name:<22} {ms:8.1f} ms a step   {over:+.1f} %, {busy:+.1f} % of processor time")
    print("both loops of the engine give the same parameters" if steps["same"] else "PARAMETERS DIFFER")
    for world, rows in init.items():
        for name in ("ds_engine", "deepspeed"):
            row = rows[name]
            told = ", ".join(f"{key.removesuffix('_s').replace('_', ' ')} {row[key]:.3f} s" for key in row)
            print(f"{world} ranks, {name:<12} {told}")
        print(f"{world} ranks, ours / DeepSpeed: {rows['ratios']}")
    print(f"ds plan, 70 B on 1024 ranks: {plan['wall_s']} s ({plan['cpu_s']} s of processor), {plan['peak_mb']} MB")
    machine = {"python": platform.python_version(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    DATA.write_text(json.dumps({**machine, "steps": steps, "initialize": init, "plan": plan}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
