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
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import records
from in_turn import in_turn
from meetings import answer_of
from peers import ensure

DECODER = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


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
    pythons = {"ds_engine": sys.executable, "deepspeed": ensure("deepspeed")}
    # Kept: compiling torch's compiler, which DeepSpeed imports, takes minutes.
    os.environ |= {"PYTHONPYCACHEPREFIX": str(records.ROOT / ".nox" / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    measures = {
        name: partial(answer_of, "engine", "init", name, ranks=world, python=python) for name, python in pythons.items()
    }
    rows = in_turn(measures, turns)
    found = [dict(zip(rows, turn, strict=True)) for turn in zip(*rows.values(), strict=True)]
    del os.environ["PYTHONPYCACHEPREFIX"]
    parts = {
        "initialize": ("initialize_s",), "import_and_initialize": ("import_s", "initialize_s"),
        "processor_until_made": ("processor_until_made_s",),
    }  # fmt: skip

    def over(turn: dict[str, dict], keys: tuple[str, ...]) -> float:
        ours, theirs = (sum(turn[name][key] for key in keys) for name in pythons)
        return ours / theirs

    ratios = {name: statistics.median(over(turn, keys) for turn in found) for name, keys in parts.items()}
    medians = {
        name: {key: round(statistics.median(turn[name][key] for turn in found), 3) for key in found[0][name]}
        for name in pythons
    }
    return {**medians, "ratios": {name: round(value, 3) for name, value in ratios.items()}}


def main(rounds: int = 24, turns: int = 5) -> int:
    init = {str(world): start_cost(world, turns) for world in (1, 2)}
    plan = {key: round(value, 2) for key, value in plan_cost().items()}
    steps = answer_of("engine", "pair", rounds)
    print(json.dumps({"steps": steps, "initialize": init, "plan": plan}, indent=1))
    records.write("engine", steps=steps, initialize=init, plan=plan)
    return 0


if __name__ == "__main__":
    parser = records.parser_of("engine", __doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=24)
    parser.add_argument("turns", nargs="?", type=int, default=5)
    sys.exit(main(**vars(parser.parse_args())))
