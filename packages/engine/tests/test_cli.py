"""`ds plan` and `ds config` say what is asked and exit with 1 where something is wrong."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_engine import cli_config, cli_elastic, cli_plan
from ds_engine.models import model_from

Write = Callable[[Any], Path]
MODEL = "from torch import nn\n\ndef make():\n    return nn.Linear(1000, 1000)\n\nNOTHING = 3\n\ndef number():\n    return 3\n"


def call(command: ModuleType, *argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser)
    result: int = command.main(parser.parse_args([str(word) for word in argv]))
    return result


def test_plan_without_a_model(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(cli_plan, written({"train_micro_batch_size_per_gpu": 2}), "--world-size", 1024) == 0
    assert "2048 = 2 per rank x 1 microbatches x 1024" in capsys.readouterr().out


def test_plan_of_a_model_on_meta(written: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some_model.py").write_text(MODEL)
    config = written({"train_batch_size": 8, "zero_optimization": {"stage": 3}})
    assert call(cli_plan, config, "--world-size", 4, "--model", f"{tmp_path}/some_model.py:make", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["model"].startswith("1,001,000 parameters")
    assert "stage 3" in rows["ZeRO"]


@pytest.mark.parametrize(
    "name", ["queue", "wave", "some_twin"]
)  # loaded; of Python, but not loaded; loaded from elsewhere
def test_a_file_may_have_the_name_of_another_module(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = importlib.import_module("queue")
    monkeypatch.setitem(sys.modules, "some_twin", ModuleType("some_twin"))
    for width in (8, 16):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "beside.py").write_text("BIAS = False\n")
        file = folder / f"{name}.py"
        file.write_text(
            f"from torch import nn\nimport beside\ndef make():\n    return nn.Linear({width}, 4, bias=beside.BIAS)\n"
        )
        for _ in range(2):
            shapes, _ = model_from(f"{file}:make")
            assert [param.shape for param in shapes.params] == [(4, width)]
    assert sys.modules["queue"] is before
    monkeypatch.delitem(sys.modules, "beside")


@pytest.mark.parametrize(
    "spec",
    [
        "no_colon",
        "missing.py:make",
        "some_model.py:absent",
        "some_model.py:NOTHING",
        "some_model.py:number",
        "no_such_module_here:f",
    ],
)
def test_bad_models(
    written: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert call(cli_plan, written({"train_batch_size": 8}), "--model", spec) == 1
    assert "ds explain plan-model" in capsys.readouterr().err


def test_check(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = written({"train_batch_size": 9})
    assert call(cli_config, "check", path) == 0
    assert "no problems" in capsys.readouterr().out
    assert call(cli_config, "check", path, "--world-size", 2) == 1
    assert "ds explain batch-arithmetic" in capsys.readouterr().err
    assert call(cli_config, "check", written({"train_batch_sze": 9})) == 1
    assert "'train_batch_size'" in capsys.readouterr().err


def test_check_and_explain_as_json(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(cli_config, "check", written({"train_batch_size": 9}), "--json", "--keys") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["problems"], told["keys"][0]["kind"]) == ([], "used")
    wrong = {"train_bach_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert call(cli_config, "check", written(wrong), "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["code"] for problem in problems} >= {"precision-both"}
    assert [i["key"] for problem in problems for i in problem["issues"]] == ["train_bach_size"]
    assert call(cli_config, "explain", written('{\n"train_batch_size": 9}'), "--json") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["train_batch_size"]["value"] == 9
    assert rows["train_batch_size"]["origin"].endswith("config.json:2")


def test_elastic_says_what_its_section_comes_to(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    section = {
        "enabled": True,
        "max_train_batch_size": 10000,
        "micro_batch_sizes": [8, 12, 16, 17],
        "min_gpus": 32,
        "max_gpus": 1500,
    }
    path = written({"elasticity": {**section, "version": 0.1}})
    assert call(cli_elastic, path) == 0
    assert capsys.readouterr().out.startswith("train batch size 9792, on any of 23 numbers of ranks: 32,")
    assert call(cli_elastic, path, "--world-size", 64, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"world": 64, "train": 9792, "micro": 17, "accumulation": 9}
    assert call(cli_elastic, path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["train"], len(told["ranks"])) == (9792, 23)
    assert call(cli_elastic, path, "--world-size", 1) == 1
    assert "ds explain elasticity-world" in capsys.readouterr().err
    assert call(cli_elastic, written({"train_batch_size": 8})) == 1
    assert "ds explain elasticity-section" in capsys.readouterr().err


def test_check_says_all_problems_at_once(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_batch_size": 8,
        "train_bach_size": 8,
        "gradient_clipping": -1,
        "fp16": {"enabled": True},
        "bf16": {"enabled": True, "check_grad_overfow": 1},
    }
    path = written(config)
    assert call(cli_config, "check", path) == 1
    told = capsys.readouterr().err
    wrong = ("train_bach_size", "gradient_clipping: found -1", "bf16.check_grad_overfow", "ds explain precision-both")
    assert [text for text in wrong if text not in told] == []
    assert "batch" not in told.split("ds explain config-invalid")[1]


def test_without_a_number_of_ranks_only_what_no_number_cures_is_told(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert call(cli_config, "check", written({**batch, "zero_optimization": {"stage": 3, "mics_shard_size": 2}})) == 0
    assert call(cli_config, "check", written({**batch, "gradient_accumulation_steps": 5})) == 1
    assert "ds explain batch" in capsys.readouterr().err


def test_explain_and_schema(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(cli_config, "explain", written('{\n"train_batch_size": 9}')) == 0
    assert "config.json:2" in capsys.readouterr().out
    assert call(cli_config, "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert "train_batch_size" in schema["properties"]
    assert schema["additionalProperties"] is False


HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_the_template_of_hugging_face(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(HUGGING_FACE)
    assert call(cli_config, "check", path) == 1
    assert call(cli_config, "check", path, "--client", "hf") == 0
    out = capsys.readouterr().out
    assert "17 values are filled in by the Trainer: bf16.enabled" in out
    assert "no problems" in out
    assert call(cli_config, "check", written(HUGGING_FACE | {"steps_per_print": "auto"}), "--client", "hf") == 1


def test_what_start_refuses_check_refuses(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"type": "SGD", "params": {"lr": "1e-4"}}
    assert call(cli_config, "check", written({"train_batch_size": 8, "optimizer": wrong})) == 1
    assert "lr" in capsys.readouterr().err
    quantized = {"stage": 1, "zero_quantized_weights": True}
    assert call(cli_config, "check", written({"train_batch_size": 8, "zero_optimization": quantized})) == 1
    assert "ds explain zero-quantized-comm" in capsys.readouterr().err


def test_check_with_a_model(
    written: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = written({"train_batch_size": 8, "sequence_parallel_size": 2})
    assert call(cli_config, "check", path, "--world-size", 2) == 0
    assert call(cli_config, "check", path, "--world-size", 2, "--model", "checked_model.py:make") == 1
    assert "ds explain sequence-attention" in capsys.readouterr().err


NORMED = """from torch import nn


def make():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Embedding(8, 4, max_norm=0.5))


def lazy():
    return nn.Sequential(nn.Linear(4, 4))
"""


def test_check_with_a_model_refuses_what_sharding_refuses(
    written: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "normed_model.py").write_text(NORMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    low = {"train_batch_size": 8, "bf16": {"enabled": True}}
    assert call(cli_config, "check", written(low)) == 0
    assert call(cli_config, "check", written(low), "--model", "normed_model.py:make") == 1
    assert "ds explain zero-buffer-format" in capsys.readouterr().err
    cast = written(low | {"data_types": {"buffer_dtype": "bf16"}})
    assert call(cli_config, "check", cast, "--model", "normed_model.py:make") == 0
    assert call(cli_config, "check", cast, "--world-size", 2, "--model", "normed_model.py:make") == 1
    assert "ds explain zero-max-norm" in capsys.readouterr().err
    assert call(cli_config, "check", written(low), "--model", "normed_model.py:lazy") == 0


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Rprop", "Muon", "Lion", "Lamb", "OneBitAdam", "SGD"])
def test_check_refuses_an_optimizer_that_cannot_be_sharded(
    written: Write, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": name, "params": {"lr": 0.01}}}
    status = call(cli_config, "check", written(config))
    assert status == (1 if name == "LBFGS" else 0), capsys.readouterr().err
    if status:
        assert "ds explain zero-optimizer" in capsys.readouterr().err


def test_keys_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(cli_config, "key", "zero_optimization.stage", "gradient_clipping") == 0
    out = capsys.readouterr().out
    assert "zero_optimization.stage: " in out
    assert "gradient_clipping: a number >= 0; default: 1.0" in out
    assert call(cli_config, "key", "gradient_cliping") == 1
    assert "gradient_clipping" in capsys.readouterr().err


def test_a_plan_without_a_model_says_so(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(cli_plan, written({"train_batch_size": 8})) == 0
    assert "no model was given" in capsys.readouterr().err
