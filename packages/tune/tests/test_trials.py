"""The doer: trials as jobs, what is kept of them, and the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_config.errors import ConfigError, LaunchError
from ds_engine import load_config, shapes_of
from ds_engine.trial_results import TrialResult, read_measured, write_json
from ds_launcher.cli import main as ds
from ds_tune.autotuner import ResourceManager, get_val_by_key, set_val_by_key
from ds_tune.cli import HELP
from ds_tune.trial_runner import TrialRunner, command_of, ended, script_words
from ds_tune.tuning_plot import draw

# What an engine does of a trial, without one: a step of this machine takes 1 ms, and 2 ms for each microbatch.
SCRIPT = """
import json, os, sys
if "--say" in sys.argv:
    sys.exit(sys.argv[sys.argv.index("--say") + 1])
order = json.load(open(os.environ["DS_TRIAL"]))
measured = json.load(open("template.json"))
steps = order["end_step"] - order["start_step"] + 1
micro, accumulation = order["changes"]["train_micro_batch_size_per_gpu"], order["changes"]["gradient_accumulation_steps"]
measured |= {"micro": micro, "accumulation": accumulation, "steps_s": [0.001 + 0.002 * accumulation] * steps, "peak_bytes": 10**8 + micro}
if not order["detail"]:
    measured["shapes"] = None
for path, found in ((order["out"], measured), (order["metric_path"], {"throughput": 1.0})):
    open(path, "w").write(json.dumps(found))
"""
REAL = """
import argparse, torch, ds_engine
from torch import nn
args = ds_engine.add_config_arguments(argparse.ArgumentParser()).parse_args()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
engine, *_ = ds_engine.initialize(args=args, model=model)
for _ in range(500):
    loss = engine(torch.randn(engine.plan.batch.micro, 64)).square().mean()
    engine.backward(loss)
    engine.step()
"""
CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    with torch.device("meta"):
        shapes = shapes_of(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    template = TrialResult(1, 1, 1, (0.1,), 0.001, 0.001, 0.0005, 0.0, 10**8, 10**7, 10**6, "cpu", 10**5, shapes=shapes)
    write_json(tmp_path / "template.json", template)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def _job(*arguments: str, **more: object) -> TrialRunner:
    return TrialRunner(CONFIG, ("ds.json",), ("--nproc", "2"), "train.py", arguments, Path("r"), Path("e"), **more)  # type: ignore[arg-type]


# ---- words


def test_a_trial_is_the_same_command_with_another_file() -> None:
    job = _job("--lr", "1", "--deepspeed_config", "ds.json")
    assert command_of(job, "/x/t.json", {}) == (
        sys.executable, "-m", "ds_launcher", "run", "--nproc", "2", "train.py", "--lr", "1", "--deepspeed_config", "/x/t.json",
    )  # fmt: skip


def test_options_of_the_script_follow_the_configuration() -> None:
    job = _job("--bs", "1", "--acc=2", mappings={"a": "--bs", "b": "--acc ", "c": "--new", "d": "--none"})
    assert script_words(job, "t", {"a": 8, "b": 4, "c": 3}) == ("--bs", "8", "--acc=4", "--new", "3")


@pytest.mark.parametrize(
    ("status", "told", "outcome"),
    [
        (None, "still going", "time limit"),
        (0, "done", "no steps"),
        (137, "", "memory"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory", "memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "memory"),
        (2, "error: unrecognized arguments", "failed"),
    ],
)
def test_what_a_job_died_of(status: int | None, told: str, outcome: str) -> None:
    assert ended(status, told)[0] == outcome


def test_another_question_has_another_sign() -> None:
    assert _job().sign == _job().sign
    assert len({_job().sign, _job("--x").sign, _job(memory_bytes=1).sign}) == 3


# ---- commands


def test_a_tuning_ends_with_files_and_goes_on_from_the_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--config", "ds.json", "--nproc", "1", "--trials", "2", "--steps", "2", "--micro", "4:8", "--json"]
    assert ds([*words, "train.py"]) == 0
    said = json.loads(capsys.readouterr().out)
    results = folder / "autotuning_results"
    assert len(said["trials"]) == 2
    assert {row["outcome"] for row in said["trials"]} == {"measured"}
    best = load_config(results / "ds_config_best.json")
    assert best.train_batch_size == 8
    assert load_config(results / "ds_config_optimal.json").model_dump() == best.model_dump()
    assert "train.py" in (results / "cmd_optimal.txt").read_text()
    assert "tuning_space" in (results / "summary.txt").read_text()
    assert json.loads((results / "profile_model_info" / "model_info.json").read_text())["num_params"] == 3 * (
        64 * 64 + 64
    )
    names = {row["name"] for row in said["trials"]}
    assert {path.stem for path in (folder / "autotuning_exps").glob("*.json")} == names
    first = next(iter(names))
    assert {
        "ds_config.json",
        "exp.json",
        "cmd.txt",
        "stdout.log",
        "stderr.log",
        "metrics.json",
        "measured.json",
        "outcome.json",
    } <= {path.name for path in (results / first).iterdir()}
    # The same command starts nothing: everything is on the disk.
    (folder / "train.py").write_text("raise SystemExit('started again')")
    assert ds([*words, "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == said["best"]
    assert ds([*words[:-1], "--explain", "--name", first, "train.py"]) == 0
    assert "forward and backward" in capsys.readouterr().out


@pytest.mark.slow
def test_an_unchanged_script_is_tuned_on_two_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "real.py").write_text(REAL)
    words = ["tune", "--config", "ds.json", "--nproc", "2", "--trials", "3", "--steps", "2", "--json", "real.py"]
    assert ds(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert 2 <= len(said["trials"]) <= 3
    assert all(row["outcome"] == "measured" for row in said["trials"])
    assert all(row["predicted_bytes"] > 0 for row in said["trials"])


def test_a_script_that_does_not_train_is_an_error_and_its_trial_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "tune",
        "--config",
        "ds.json",
        "--nproc",
        "1",
        "--micro",
        "4:8",
        "train.py",
        "--say",
        "needs a --data argument",
    ]
    assert ds(words) == 1
    told = capsys.readouterr().err
    assert "LaunchError" in told
    assert "needs a --data argument" in told
    kept = json.loads(next((folder / "autotuning_results").glob("*/outcome.json")).read_text())
    assert kept["outcome"] == "failed"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py"], "no configuration"),
        (["--config", "ds.json", "none.py"], "no script"),
        (["--config", "ds.json", "--micro", "8:4", "train.py"], "LOW:HIGH"),
        (["--config", "ds.json", "--trials", "0", "train.py"], "more than 0"),
        (["--config", "ds.json", "--memory", "much", "train.py"], "is no size"),
        (["--config", "ds.json", "--nproc", "2", "--micro", "3:3", "train.py"], "none of 4 configurations fits"),
        (
            ["--config", "ds.json", "--nproc", "1", "--micro", "4:4", "--fix", "zero_optimization.stage", "train.py"],
            "nothing is left",
        ),
    ],
)
def test_bad_input_is_told(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert ds(["tune", *words]) == 1
    assert told in capsys.readouterr().err


def test_no_space_for_results_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_tune import trial_runner

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trial_runner, "write_json", full)
    with pytest.raises(LaunchError, match="no space") as caught, trial_runner._writing(folder):
        full()
    assert caught.value.code == "tune-results"


def test_a_picture_has_a_point_for_each_trial(tmp_path: Path) -> None:
    row = {"name": "z0", "predicted_ms": 1.0, "measured_ms": 2.0, "predicted_bytes": 1 << 20, "measured_bytes": 1 << 21}
    pytest.importorskip("matplotlib")
    text = draw([row, {**row, "measured_ms": None}], tmp_path / "t.svg").read_text()
    assert "<svg" in text


def test_autotuning_asks_for_a_configuration() -> None:
    from ds_tune.upstream import autotune

    with pytest.raises(ConfigError) as caught:
        autotune("tune", (), "train.py", ())
    assert caught.value.code == "tune-config"
    assert HELP


def test_experiments_of_files_run_and_the_best_is_named(folder):
    for name, micro in (("small", 2), ("large", 8)):
        config = {**CONFIG, "train_micro_batch_size_per_gpu": micro}
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "ds_config": config}))
    args = SimpleNamespace(user_script="train.py", user_args=["--deepspeed_config", "ds.json"])
    manager = ResourceManager(args, ["localhost"], 1, folder / "results", folder / "exps", None)
    manager.schedule_experiments([str(folder / "small.json"), str(folder / "large.json")])
    manager.run()
    best, samples_per_s = manager.parse_results("throughput")
    assert best == "large"  # one microbatch of 8 takes 3 ms, four of 2 take 9 ms
    assert samples_per_s == pytest.approx(8 / 0.003)


def test_a_key_is_read_and_set_wherever_it_is():
    config = {"a": {"b": {"stage": 1}}, "stage_of": {"stage": 2}}
    assert get_val_by_key(config, "stage") == 1
    assert get_val_by_key(config, "absent") is None
    set_val_by_key(config, "stage", 3)
    assert config == {"a": {"b": {"stage": 3}}, "stage_of": {"stage": 3}}


# ---- trials in a world that is not there

SLOW, FAST = "inside=0.02,200;between=0.02,200", "inside=400,2;between=400,2"


@pytest.mark.parametrize(("links", "least_s"), [(FAST, 0.0), pytest.param(SLOW, 0.006, marks=pytest.mark.slow)])
def test_trials_are_rehearsals_of_a_world_that_is_not_there(folder: Path, links: str, least_s: float) -> None:
    """One process measures what a step of four ranks takes: 50 KiB of gradients at 20 MB/s are several milliseconds."""
    (folder / "train.py").write_text(REAL)
    words = [
        "--config",
        "ds.json",
        "--links",
        links,
        "--world-size",
        "4",
        "--micro",
        "2:2",
        "--trials",
        "1",
        "--steps",
        "2",
    ]
    assert ds(["tune", *words, "--search", "zero_optimization.stage=1,2", "train.py"]) == 0
    text = Path("autotuning_results/ds_config_best.json").read_text()
    assert "4 cpu ranks, as rehearsed by one of them" in text
    (path,) = Path("autotuning_results").glob("*/measured.json")
    measured = read_measured(path)
    assert (measured.world, measured.rehearsed) == (4, True)
    assert measured.step_s > least_s
    assert "ds_tune.rehearsed_trial" in path.with_name("cmd.txt").read_text()


@pytest.mark.slow
def test_a_rehearsed_trial_that_fails_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("raise SystemExit('no data here')\n")
    words = ["--config", "ds.json", "--links", FAST, "--world-size", "4", "--trials", "1", "train.py"]
    assert ds(["tune", *words]) == 1
    assert "no data here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--links", FAST], "world of 0 ranks"),
        (["--links", FAST, "--world-size", "6", "--nodes", "4"], "6 ranks on 4 nodes"),
        (["--links", "nothing-like-it", "--world-size", "4"], "nothing-like-it"),
        (["--links", FAST, "--world-size", "4", "--nproc", "2"], "one process"),
    ],
)
def test_wrong_worlds_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert ds(["tune", "--config", "ds.json", *words, "train.py"]) == 1
    assert complaint in capsys.readouterr().err
