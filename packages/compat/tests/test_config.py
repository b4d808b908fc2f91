"""Upstream's laxness is accepted with a warning that names the key; everything else stays strict."""

from __future__ import annotations

import argparse
import json
import logging

import deepspeed
import pytest
from deepspeed._ours.config.accepted_keys import accepted
from deepspeed._ours.config.config import raw_config
from deepspeed._surface.upstream_names import configuration_fields
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from ds_config import keys
from ds_config.errors import ConfigError, UnsupportedError
from ds_engine import Config


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


def test_a_null_that_upstream_takes_is_a_key_left_out():
    raw = {"train_batch_size": 4, "bf16": None, "aio": None, "dump_state": None, "prescale_gradients": None}
    assert accepted(raw) == {"train_batch_size": 4}
    flags = {"partition_activations": None, "cpu_checkpointing": None, "profile": True}
    assert accepted({"activation_checkpointing": flags}) == {"activation_checkpointing": {"profile": True}}
    assert accepted({"fp16": None}) == {"fp16": None}  # refused afterwards, as upstream does


def test_unknown_keys_of_sections_that_upstream_reads_key_by_key_are_left_out_with_a_warning(said):
    raw = {"flops_profiler": {"enabled": True, "step": 2}, "optimizer": {"type": "Adam", "torch_adam": True}}
    assert accepted(raw) == {"flops_profiler": {"enabled": True}, "optimizer": {"type": "Adam"}}
    assert ["'flops_profiler.step'" in said.messages[0], "'optimizer.torch_adam'" in said.messages[1]] == [True, True]


def test_keys_of_optimizers_that_upstream_does_not_read_are_left_out_with_a_warning(said):
    """Of Muon's parameters upstream picks those that it knows; of torch's Adam it drops the format of states."""
    muon = {"type": "Muon", "params": {"momentum": 0.9, "nesterov": False}}
    assert accepted({"optimizer": muon})["optimizer"]["params"] == {"momentum": 0.9}
    adam = {"type": "Adam", "params": {"torch_adam": True, "fp32_optimizer_states": False}}
    assert accepted({"optimizer": adam})["optimizer"]["params"] == {"torch_adam": True}
    assert [
        key in message for key, message in zip(("nesterov", "fp32_optimizer_states"), said.messages, strict=True)
    ] == [True, True]


def test_sections_without_a_type_are_none_and_an_unknown_rise_is_logarithmic(said):
    assert accepted({"optimizer": {}, "scheduler": {"type": None, "params": {}}}) == {}
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine", "warmup_num_steps": 3}}}
    assert accepted(warmup)["scheduler"]["params"] == {"warmup_num_steps": 3}
    assert "'cosine'" in said.text


def test_quoted_values_of_typed_sections_are_what_they_say():
    """Upstream's pydantic models read them so; what it reads key by key stays as it is, and so does what says nothing."""
    zero = {"stage": "2", "reduce_bucket_size": "500000", "overlap_comm": "false"}
    raw = {
        "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu", "pin_memory": "True", "ratio": "0.5"}},
        "fp16": {"enabled": "yes", "initial_scale_power": "12", "loss_scale_window": "many"},
        "train_batch_size": "4",
    }
    zero = {"stage": 2, "reduce_bucket_size": 500000, "overlap_comm": False}
    assert accepted(raw) == {
        "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}},
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": "many"},
        "train_batch_size": "4",
    }


def test_a_key_that_is_no_string_is_unknown(said):
    assert accepted({1: 2, "train_batch_size": 4}) == {"train_batch_size": 4}
    assert "key 1 is unknown" in said.text


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


def test_what_scripts_of_deepspeed_ask_for_and_nothing_here_depends_on_is_left_out_with_a_warning(said):
    raw = {
        "zero_optimization": {"stage": 2, "ignore_unused_parameters": False},
        "torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["torch.nn.Linear"]},
        "seq_parallel_communication_data_type": "bf16",
        "pipeline": {"stages": 3, "partition": "uniform", "seed_layers": True, "activation_checkpoint_interval": 1},
    }
    section = {"pipeline": {"activation_checkpoint_interval": 1}}
    assert accepted(raw) == {"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": False}} | section
    assert [message.split(" ")[0] for message in said.messages] == [
        "torch_autocast.lower_precision_safe_modules",
        "seq_parallel_communication_data_type",
        "pipeline.stages",
        "pipeline.partition",
        "pipeline.seed_layers",
        "zero_optimization.ignore_unused_parameters",
    ]
    deepspeed.DeepSpeedConfig(raw | {"train_batch_size": 1})
    safe = accepted({"torch_autocast": {"enabled": True}})["torch_autocast"]["lower_precision_safe_modules"]
    assert safe == [
        f"torch.nn.modules.{name}" for name in ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")
    ]
    assert accepted({"zero_optimization": {"ignore_unused_parameters": True}})["zero_optimization"]
    for host in ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}):  # there upstream looks for them
        section = {"stage": 2, "ignore_unused_parameters": False, **host}
        assert accepted({"zero_optimization": section})["zero_optimization"]["ignore_unused_parameters"] is False


def test_sections_of_templates_that_upstream_takes_without_using_them(said):
    raw = {
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
        "flops_profiler": {"enabled": True, "profile_step": -1, "detailed": True},
    }
    assert accepted(raw) == {"activation_checkpointing": {"partition_activations": True}}
    assert [message.split(" ")[0] for message in said.messages] == [
        "activation_checkpointing.contiguous_memory_optimization",
        "flops_profiler",
    ]
    deepspeed.DeepSpeedConfig(raw | {"train_batch_size": 1})
    assert accepted({"flops_profiler": {"enabled": True, "profile_step": 0}}) == {"flops_profiler": {"enabled": True}}
    raw["activation_checkpointing"]["number_checkpoints"] = 2
    assert accepted(raw)["activation_checkpointing"]["contiguous_memory_optimization"]


def test_keys_of_templates_that_do_nothing_are_told_at_info_level(said):
    raw = {"zero_optimization": {"stage": 3, "max_reuse_distance": 10**9, "reduce_bucket_size": 10**6}}
    with said.at_level(logging.INFO, "DeepSpeed"):
        assert accepted(raw) == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10**6}}
    assert [(r.levelname, r.getMessage().split(" ")[0]) for r in said.records] == [
        ("INFO", "zero_optimization.max_reuse_distance")
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


def test_sections_under_upstreams_names() -> None:
    raw = {"train_batch_size": 1, "compile": {"deepcompile": True}, "tensor_parallel": {"autotp_size": 1}}
    config = deepspeed.DeepSpeedConfig(raw)
    assert config.compile_config.deepcompile
    assert config.tensor_parallel_config.autotp_size == 1
    assert config.timers_config.throughput.enabled
    assert config.autotuning_config == config.autotuning
    assert not config.expert_parallel_config.enabled


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
    assert tuned.warmup_num_steps == 1000


SECTIONS = {
    "deepspeed.comm.config.CommsLoggerConfig": "comms_logger",
    "deepspeed.compile.config.CompileConfig": "compile",
    "deepspeed.monitor.config.CSVConfig": "csv_monitor",
    "deepspeed.monitor.config.CometConfig": "comet",
    "deepspeed.monitor.config.DeepSpeedMonitorConfig": "",
    "deepspeed.monitor.config.TensorBoardConfig": "tensorboard",
    "deepspeed.monitor.config.WandbConfig": "wandb",
    "deepspeed.runtime.config.HybridEngineConfig": "hybrid_engine",
    "deepspeed.runtime.precision_config.DeepSpeedBF16Config": "bf16",
    "deepspeed.runtime.precision_config.DeepSpeedFP16Config": "fp16",
    "deepspeed.runtime.tensor_parallel.config.TPConfig": "tensor_parallel.tp",
    "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig": "tensor_parallel",
    "deepspeed.runtime.zenflow.zenflow_config.ZenFlowConfig": "zero_optimization.zenflow",
    "deepspeed.runtime.zero.config.DeepSpeedZeroConfig": "zero_optimization",
    "deepspeed.runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
}
"""Classes of upstream that read a section of training's configuration."""


@pytest.mark.parametrize("reader", SECTIONS)
def test_every_key_of_upstream_is_known(reader):
    section = tuple(filter(None, SECTIONS[reader].split(".")))
    known = {
        key.path[len(section)] for key in keys(Config) if key.path[: len(section)] == section and key.path != section
    }
    wanted = configuration_fields()[reader].split()
    assert wanted
    assert [key for key in wanted if key not in known] == []


def test_every_class_of_upstream_that_reads_a_training_section_is_looked_at():
    others = [name for name in configuration_fields() if name not in SECTIONS and ".inference." not in name]
    assert others == [
        "deepspeed.utils.config.DeepSpeedThroughputTimerConfig"
    ]  # the section `timers`, which nothing reads


def test_keys_of_the_newest_release():
    known = {
        "zero_optimization": {"stage": 2, "compute_grad_norm": False, "parameter_alignment": True},
        "tensor_parallel": {"vocab_parallel_lm_head": False, "vocab_parallel_ce_backend": "torch"},
        "compile": {"autoep_non_moe": False},
        "data_types": {"keep_in_fp32_modules": ["bias"]},
        "disable_python_gc": True,
    }
    model = deepspeed.DeepSpeedConfig(known | {"train_batch_size": 1}).model
    assert (model.disable_python_gc, model.data_types.keep_in_fp32_modules) == (True, ("bias",))
    for section, key in (
        ("tensor_parallel", {"vocab_parallel_ce_backend": "liger"}),
        ("compile", {"autoep_non_moe": True}),
    ):
        with pytest.raises(UnsupportedError):
            deepspeed.DeepSpeedConfig({"train_batch_size": 1, section: key})
    with pytest.raises(ConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "data_types": {"keep_in_fp32_modules": "bias"}})
