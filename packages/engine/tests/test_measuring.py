"""A run that measures itself: what it writes, and that it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
from ds_config.errors import ConfigError
from ds_engine.trial_recorder import layer_groups
from ds_engine.trial_results import read_measured, write_json
from ds_engine.trial_spec import DS_TRIAL, TrialSpec, laid_over


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def _train(config: dict[str, Any], samples: int = 4) -> None:
    engine, *_ = ds_engine.initialize(model=Blocks(), config=config)
    try:
        for _ in range(60):
            loss = engine(torch.randn(samples, 32))
            engine.backward(loss)
            engine.step()
    finally:
        engine.close()


def test_an_order_changes_the_configuration_measures_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = TrialSpec({"train_micro_batch_size_per_gpu": 4}, 2, 4, str(tmp_path / "out" / "measured.json"), detail=True)
    write_json(tmp_path / "order.json", order)
    monkeypatch.setenv(DS_TRIAL, str(tmp_path / "order.json"))
    with pytest.raises(SystemExit) as ended:
        _train(CONFIG)
    assert ended.value.code == 0
    found = read_measured(tmp_path / "out" / "measured.json")
    assert (found.micro, found.accumulation, len(found.steps_s), found.world) == (4, 2, 3, 1)
    assert found.peak_bytes >= found.start_bytes > 0
    assert 0 < found.forward_s + found.backward_s <= sum(found.steps_s)
    (layer,) = found.layers
    assert (layer.pattern, layer.count) == ("blocks.*", 3)
    # Of each block: its input and its activation, of which the next block's input is the same tensor.
    assert layer.saved_bytes == 4 * (4 * 32 * 4)
    assert layer.input_bytes == 3 * (4 * 32 * 4)
    assert found.saved_bytes == layer.saved_bytes + 4 * 4  # the loss keeps what it squares
    assert found.flops == 2 * 4 * (3 * 32 * 32 + 32)
    assert found.shapes is not None
    assert found.shapes.numel == sum(p.numel() for p in Blocks().parameters())


def test_a_section_that_is_enabled_is_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = {"enabled": True, "start_profile_step": 1, "end_profile_step": 2, "metric_path": "deep/metrics.json"}
    with pytest.raises(SystemExit):
        _train({**CONFIG, "autotuning": section}, samples=8)
    metrics = json.loads((tmp_path / "deep" / "metrics.json").read_text())
    assert metrics["throughput"] == pytest.approx(8 / (metrics["latency"] / 1e3))
    assert metrics["FLOPS_per_gpu"] > 0
    assert {"forward", "backward", "step"} <= set(metrics)


def test_the_facts_of_a_model_are_written_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        _train({**CONFIG, "autotuning": {"enabled": True, "model_info": {"profile": True}}}, samples=8)
    facts = json.loads((tmp_path / "autotuning_model_info.json").read_text())
    assert facts["num_params"] == facts["trainable_num_params"] == sum(p.numel() for p in Blocks().parameters())
    assert facts["activation_mem_per_gpu"] > 0


def test_without_an_order_a_run_is_a_run(tmp_path: Path) -> None:
    _train({**CONFIG, "autotuning": {"end_profile_step": 1}}, samples=8)


def test_a_wrong_order_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        _train({**CONFIG, "autotuning": {"enabled": True, "end_profile_step": 2}})
    assert caught.value.code == "trial-steps"
    monkeypatch.setenv(DS_TRIAL, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError) as caught:
        _train(CONFIG)
    assert caught.value.code == "trial-spec"


def test_changes_are_laid_over_a_copy() -> None:
    before = {"a": 1, "b": {"c": 2}}
    assert laid_over(before, {"b.c": 3, "b.d.e": [4], "a": None}) == {"b": {"c": 3, "d": {"e": [4]}}}
    assert before == {"a": 1, "b": {"c": 2}}


def test_layers_of_one_shape_are_one_group() -> None:
    assert {k: len(v) for k, v in layer_groups(Blocks()).items()} == {"blocks.*": 3}
    assert layer_groups(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))) == {}
