"""Upstream's laxness is accepted with a warning that names the key; everything else stays strict."""

from __future__ import annotations

import argparse
import json
import logging

import deepspeed
import pytest
from deepspeed._ours.accepted_keys import accepted
from deepspeed._ours.config import raw_config
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from ds_config.errors import ConfigError


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "propagate", True)
    return caplog


def test_unknown_top_level_keys_are_left_out_with_one_warning_each(said):
    raw = {"train_batch_size": 4, "zero_optimization.reduce_bucket_size": 10, "train_bach_size": 2}
    assert accepted(raw) == {"train_batch_size": 4}
    assert len(said.messages) == 2
    assert "'train_bach_size'" in said.messages[1]
    assert "'train_batch_size'" in said.messages[1]


def test_unknown_keys_of_sections_that_upstream_reads_key_by_key_are_left_out_with_a_warning(said):
    raw = {"flops_profiler": {"enabled": True, "step": 2}, "optimizer": {"type": "Adam", "torch_adam": True}}
    assert accepted(raw) == {"flops_profiler": {"enabled": True}, "optimizer": {"type": "Adam"}}
    assert ["'flops_profiler.step'" in said.messages[0], "'optimizer.torch_adam'" in said.messages[1]] == [True, True]


def test_auto_inside_zero_is_the_default(said):
    raw = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}}}
    assert accepted(raw) == {"zero_optimization": {"stage": 3, "offload_param": {}}}
    assert "zero_optimization.offload_param.device" in said.text


def test_what_does_nothing_beside_other_keys_is_left_out_with_a_warning_that_says_what_would_be_right(said):
    raw = {
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "zero_quantized_weights": False},
        "fp16": {"enabled": False, "auto_cast": True},
        "sparse_gradients": True,
    }
    assert accepted(raw) == {"zero_optimization": {"stage": 2}, "fp16": {"enabled": False}}
    assert [message.split(" ")[0] for message in said.messages] == [
        "zero_optimization.offload_param",
        "sparse_gradients",
        "fp16.auto_cast",
    ]
    deepspeed.DeepSpeedConfig(raw | {"train_batch_size": 1})


def test_keys_of_templates_that_do_nothing_are_told_at_info_level(said):
    raw = {"zero_optimization": {"stage": 3, "sub_group_size": 10**9, "reduce_bucket_size": 10**6}}
    with said.at_level(logging.INFO, "DeepSpeed"):
        assert accepted(raw) == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10**6}}
    assert [(r.levelname, r.getMessage().split(" ")[0]) for r in said.records] == [
        ("INFO", "zero_optimization.sub_group_size")
    ]


def test_a_warmup_of_no_steps_is_what_trainers_write():
    section = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 0}}
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 1, "scheduler": section}).scheduler_name == "WarmupLR"


@pytest.mark.parametrize("mode", ["maybe", "", 3])
def test_a_mode_of_tag_validation_that_upstream_does_not_know_is_an_error(mode):
    for known in ("Ignore", "warn", "FAIL"):
        accepted({"checkpoint": {"tag_validation": known}})
    with pytest.raises(ConfigError, match="expected Ignore, Warn or Fail"):
        accepted({"checkpoint": {"tag_validation": mode}})


def test_inside_a_section_a_typo_is_an_error():
    with pytest.raises(ConfigError, match="reduce_bucket_size"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"reduce_bucket_sise": 3}})


def test_where_a_configuration_comes_from(tmp_path):
    raw = {"train_batch_size": 1}
    assert raw_config(raw) is raw
    assert raw_config(None, raw) is raw
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw))
    assert raw_config(str(file)) == raw
    assert raw_config(None, None, argparse.Namespace(deepspeed_config=str(file))) == raw
    assert raw_config(None, None, {"deepspeed_config": str(file)}) == raw
    with pytest.raises(ConfigError):
        raw_config(raw, raw)
    with pytest.raises(ConfigError):
        raw_config(None)


def test_deepspeed_config_tells_the_batch():
    config = deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (
        6,
        3,
        2,
    )
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization_stage == 0
    assert not config.fp16.enabled
    with pytest.raises(ConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1}, mpu=object())


def test_elasticity_gives_the_batch():
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [4, 8], "min_gpus": 1, "max_gpus": 4}
    config = deepspeed.DeepSpeedConfig({"elasticity": {**elastic, "version": 0.1}})
    assert config.train_batch_size == 48
    assert config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps == 48


def test_duplicate_keys():
    hook = dict_raise_error_on_duplicate_keys
    assert json.loads('{"a": 1, "b": {"c": 2}}', object_pairs_hook=hook) == {"a": 1, "b": {"c": 2}}
    with pytest.raises(ValueError, match="a"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=hook)


def test_arguments_of_scripts():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert given.deepspeed
    assert given.deepspeed_config == "x.json"
    tuned = deepspeed.add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "WarmupLR"])
    assert tuned.lr_schedule == "WarmupLR"
    assert tuned.warmup_num_steps is None
