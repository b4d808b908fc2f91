"""How well `ds tune` predicts and chooses: nox -s bench -- tune PART ...; then `page` fills docs/benchmarks/tune.md and draws its picture.

grid FORM     one model (quickstart, deep, wide, experts) on 2 ranks: every configuration of a grid in a job of its own, then a tuning
              with a quarter of as many trials; about 7 minutes alone
limits [N]    N drawn configurations (200) under a limit of memory (RLIMIT_AS): predicted to fit or not, and whether they did; 5 minutes
page          the page and the picture, from the record
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import records
import tables
from meetings import WORKERS

WORKER = WORKERS / "tune.py"
FORMS = ("quickstart", "deep", "wide", "experts")
CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}
MICRO, STAGE = "train_micro_batch_size_per_gpu", "zero_optimization.stage"
SIZES, STAGES = (2, 4, 8), (0, 1, 2, 3)
JOB_S = 60.0  # torch waits for ever where memory for a thread of a gloo group was missing: such a job has died
FASTEST, ROUNDS = (
    3,
    3,
)  # as the page says; so many of the grid's fastest are measured again beside the choice, so many times


def noted(part: str, found: Any) -> None:
    """Put one part into the record."""
    records.add("tune", **{part: {"date": str(datetime.date.today()), **found}})


# ---- the grid


def grid(form: str) -> None:
    """Every configuration of the grid measured, and a tuning beside it."""
    from ds_tune import SearchLimits
    from ds_tune.request import asked_of
    from ds_tune.results_writer import rows_of
    from ds_tune.search import NextTrial, TrialBudget, fit_and_predict
    from ds_tune.trial_runner import TrialRunner, run_trial
    from ds_tune.tuning import Tuning

    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    folder = Path(tempfile.mkdtemp(prefix="ds-tune-"))
    values = {MICRO: SIZES, STAGE: STAGES}

    (folder / "ds.json").write_text(json.dumps(CONFIG))
    words = (str(folder / "ds.json"),)

    def job_of(name: str) -> TrialRunner:
        return TrialRunner(
            CONFIG, words, ("--nproc", "2"), str(WORKER), ("--form", form, "--deepspeed_config", *words), folder / name, folder / f"{name}-exps",
            time_limit_s=120,
        )  # fmt: skip

    def tuning(name: str, budget: TrialBudget, tuner: Any) -> Tuning:
        asked = replace(asked_of(CONFIG), values=values, budget=budget, tuner=tuner)
        return Tuning(asked, job_of(name), 2, on_trial=_tell)

    began = time.monotonic()
    # The first trial tells the layers, and with them the space doubles: every candidate is measured once, in the order of the grid.
    whole = tuning("grid", TrialBudget(1000, 4), "gridsearch").run()
    size = len(whole.candidates)
    ours = tuning("ours", TrialBudget(max(1, size // 4), 4), "model_based").run()
    known = fit_and_predict(ours.candidates, ours.results, SearchLimits())
    rows = [
        row for row in rows_of(whole.candidates, whole.results, known, "throughput") if row["outcome"] == "measured"
    ]
    if ours.best is None or whole.best is None or not rows:
        raise SystemExit(f"{form}: nothing was measured; see {folder}")
    # One job says little of what is 3 % apart: the choice and the grid's fastest are measured again, in turns.
    taken = {row["name"]: row["measured_ms"] for row in rows}
    names = dict.fromkeys([ours.best[0].name, *sorted(taken, key=lambda name: taken[name])[:FASTEST]])
    again = {name: [] for name in names}
    for round_ in range(ROUNDS):
        for name in random.Random(round_).sample(list(names), len(names)):
            candidate = next(c for c in whole.candidates if c.name == name)
            result = run_trial(job_of("again"), NextTrial(candidate, round_, 8, "again"), round_)
            if result.measured is not None:
                again[name].append(result.measured.step_s * 1e3)
    medians = {name: statistics.median(times) for name, times in again.items() if times}
    tried = {result.name for result in ours.results}
    found = {
        "rows": [{k: row[k] for k in ("name", "predicted_ms", "measured_ms", "predicted_bytes", "measured_bytes")}
                 | {"tried": row["name"] in tried} for row in rows],
        "candidates": size, "trials": len(ours.results), "chosen": ours.best[0].name, "chosen_ms": medians[ours.best[0].name],
        "best": min(medians, key=lambda name: medians[name]), "best_ms": min(medians.values()), "again_ms": again,
        "base_bytes": int(known.numbers.process_bytes) if known.numbers else 0, "minutes": (time.monotonic() - began) / 60,
    }  # fmt: skip
    noted(f"grid {form}", found)
    print(_line(form, found))
    shutil.rmtree(folder)


def _tell(step: Any, result: Any) -> None:
    if result is not None:
        took = f"{result.measured.step_s * 1e3:.1f} ms" if result.measured else result.outcome
        print(f"  {step.candidate.name:<24} {took} ({result.seconds:.1f} s)", flush=True)


def _line(form: str, found: dict[str, Any]) -> str:
    e = tables.tune_errors(found)
    return (
        f"{form}: {found['candidates']} configurations; memory {e['memory']:.1%} off (above the bare process {e['above the process']:.1%}), "
        f"time {e['time']:.1%}; {found['trials']} trials chose {found['chosen']}, {e['choice']:.1%} slower than {found['best']}"
    )


# ---- limits


def limits(count: int) -> None:
    """Drawn models and configurations, each forked from one process that has imported everything, under a limit of address space."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MALLOC_ARENA_MAX": "1"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    if os.environ.get("DS_TUNE_LIMITS") != "again":  # malloc reads its setting when a process starts
        os.environ["DS_TUNE_LIMITS"] = "again"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    draw, rows, began = random.Random(43), [], time.monotonic()
    models = max(1, count // 20)
    for index in range(models):
        sizes = {"layers": draw.randint(2, 8), "width": draw.choice((128, 192, 256, 384)), "heads": 4}
        rows += _of_model(sizes, draw, count // models)
        wrong = sum(row["predicted"] != row["fitted"] for row in rows)
        print(f"model {index + 1} of {models} {sizes}: {len(rows)} drawn, {wrong} predicted wrong", flush=True)
    noted("limits", {"rows": rows, "minutes": (time.monotonic() - began) / 60})


def _of_model(sizes: dict[str, int], draw: random.Random, count: int) -> list[dict[str, Any]]:
    import torch
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    from ds_engine import shapes_of
    from ds_tune import Result, SearchLimits, TuningTask, candidates_of, fit_and_predict

    with torch.device("meta"):
        shapes = shapes_of(GPT(GPTConfig(**sizes)))
    space = {MICRO: (1, 2, 4, 8), STAGE: STAGES, "activation_checkpointing.modules": ((), ("blocks.*",))}
    found, _ = candidates_of(TuningTask(CONFIG, shapes, 2), space, SearchLimits())
    by_name = {c.name: c for c in found}
    results = []
    probes = [
        "z1_gas8_tmbspg1",
        "z1_gas1_tmbspg8",
        "z0_gas2_tmbspg4",
        "z2_gas2_tmbspg4",
        "z3_gas2_tmbspg4",
        "z1_gas2_tmbspg4_ckpt",
    ]
    for i, name in enumerate(probes):
        measured = _forked(by_name[name], sizes, 0, detail=i == 0)
        if i == 0 and measured is not None:  # measuring the links has taken memory of its own by the end
            plain = _forked(by_name[name], sizes, 0)
            measured = None if plain is None else replace(measured, peak_bytes=plain.peak_bytes)
        if measured is None:
            raise SystemExit(f"{name} of {sizes} died without a limit")
        results.append(Result(name, 0, "measured", measured))
    known = fit_and_predict(found, results, SearchLimits())
    rows = []
    for _ in range(count):
        candidate = draw.choice(found)
        said = known.predicted[candidate.name].peak_bytes
        # Most limits are near: there a wrong number is seen.
        limit = int(said * draw.choice((draw.uniform(0.9, 0.99), draw.uniform(1.01, 1.1), draw.uniform(0.7, 1.3))))
        fitted = _forked(candidate, sizes, limit) is not None
        rows.append(
            {"name": candidate.name, "limit": limit, "said": int(said), "predicted": said <= limit, "fitted": fitted}
        )
    return rows


def _forked(candidate: Any, sizes: dict[str, int], limit: int, *, detail: bool = False) -> Any:
    """What a job of two forked ranks measured, its peak being that of the address space; None when one died."""
    from ds_engine.trial_results import read_measured

    folder = Path(tempfile.mkdtemp(prefix="ds-tune-"))
    ranks = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            _rank(rank, candidate, sizes, (folder, limit, detail))
        ranks.append(pid)
    ended: dict[int, int] = {}
    deadline = time.monotonic() + JOB_S
    while len(ended) < 2:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[pid] = status
        else:
            time.sleep(0.01)
        if any(ended.values()) or time.monotonic() > deadline:
            for other in ranks:
                if other not in ended:
                    os.kill(other, 9)
    try:
        peaks = [int((folder / f"peak{rank}").read_text()) for rank in range(2)]
        return replace(read_measured(folder / "measured.json"), peak_bytes=max(peaks))
    except OSError:
        return None
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, candidate: Any, sizes: dict[str, int], how: tuple[Path, int, bool]) -> None:
    folder, limit, detail = how
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        import torch
        from model import GPT, GPTConfig

        import ds_engine
        from ds_engine.trial_results import write_json
        from ds_engine.trial_spec import TrialSpec

        order = folder / f"order{rank}.json"
        write_json(order, TrialSpec(candidate.changes, 2, 3, str(folder / "measured.json"), detail=detail))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_TRIAL": str(order)}
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        torch.manual_seed(0)
        engine, *_ = ds_engine.initialize(model=GPT(GPTConfig(**sizes)), config=CONFIG)
        while True:
            loss = engine(torch.randint(256, (engine.plan.batch.micro, 129)))
            engine.backward(loss)
            engine.step()
    except SystemExit as end:
        code = int(end.code or 0)
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak"))
        (folder / f"peak{rank}").write_text(str(int(line.split()[1]) * 1024))
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def main() -> None:
    parser = records.parser_of("tune", __doc__)
    parser.add_argument("part", choices=("grid", "limits", "page"))
    parser.add_argument("what", nargs="?", default="")
    args = parser.parse_args()
    sys.path.insert(0, str(records.ROOT / "docs" / "examples" / "train_gpt"))
    if args.part == "limits":
        for name in ("ds_engine.builder", "ds_tune.tuning"):  # before the first fork
            importlib.import_module(name)
        limits(int(args.what or 200))
    if args.part == "grid":
        for form in [args.what] if args.what else FORMS:
            grid(form)
    picture()
    tables.fill("tune")


def picture() -> None:
    """Draw what was predicted beside what was measured."""
    from ds_tune.tuning_plot import draw

    parts = {name: part for name, part in records.read("tune").items() if name.startswith("grid ")}
    points = [{**row, "name": f"{name[5:]} {row['name']}"} for name in parts for row in parts[name]["rows"]]
    draw(points, records.PAGES / "img" / "tune.svg")


if __name__ == "__main__":
    main()
