"""Plans: pure, printable, the same everywhere; all broken rules are one error."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ds_engine
from ds_config.errors import ConfigError, DsError, PlanError, UnsupportedError
from ds_engine import Shapes, load_config, make_plan, shapes_of
from ds_engine.models import _shapes, decoder_shapes, shapes_from
from ds_pipe import PipelineSpec
from ds_zero.layout.units import ModuleInfo, ParamInfo


def shapes(layers: int = 3, width: int = 16) -> Shapes:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return shapes_of(model)


def planned(world: int = 2, **changes: Any) -> Any:
    content = {"train_batch_size": 16, "gradient_accumulation_steps": 2} | changes
    return make_plan(load_config(content), shapes(), world)


@pytest.mark.parametrize(
    ("stage", "program"),
    [(0, "0F0 0B0 0F1 0B1*"), (1, "0F0 0B0 0F1 0B1*"), (2, "0F0 0B0* 0F1 0B1*"), (3, "0F0 0B0* 0F1 0B1*")],
)
def test_the_stage_decides_when_gradients_are_reduced(stage: int, program: str) -> None:
    assert str(planned(zero_optimization={"stage": stage}).program) == program


@pytest.mark.parametrize(("stage", "units"), [(0, 1), (1, 6)])
def test_plain_data_parallelism_is_not_cut_by_the_keys_of_zero(stage: int, units: int) -> None:
    """Transformers fills `reduce_bucket_size` in with hidden_size squared, at any stage."""
    assert len(planned(zero_optimization={"stage": stage, "reduce_bucket_size": 256}).units) == units


def test_a_plan_is_the_same_everywhere_and_prints() -> None:
    text = str(planned())
    assert text == str(planned())
    for said in (
        "816 parameters",
        "16 = 4 per rank x 2 microbatches x 2 data-parallel ranks",
        "stage 0",
        "0F0 0B0 0F1 0B1*",
    ):
        assert said in text
    long = str(planned(train_batch_size=400, gradient_accumulation_steps=100))
    assert "..." in long
    assert "0B99*" in long


def test_memory_shrinks_with_the_stage_and_the_ranks() -> None:
    def total(stage: int, world: int) -> int:
        zero = {"stage": stage, "param_persistence_threshold": 0}
        return planned(world, train_batch_size=16 * world, zero_optimization=zero).memory.total_bytes

    by_stage = [total(stage, 8) for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert len(set(by_stage)) == 3  # stages 1 and 2 differ in what comes and goes within a step
    assert total(3, 16) < total(3, 8)
    assert total(0, 16) == total(0, 8)


def test_replicas_keep_a_copy_each_and_must_fit_the_ranks() -> None:
    def made(world: int, **zero: Any) -> Any:
        asked = {"stage": 3, "param_persistence_threshold": 0} | zero
        return planned(world, train_batch_size=16 * world, zero_optimization=asked)

    assert made(8, mics_shard_size=2).memory == made(2).memory
    assert made(8, mics_shard_size=2).sharding.shard_size == 2
    assert made(8).sharding.shard_size is None
    for zero in ({"mics_shard_size": 3}, {"mics_shard_size": 0}, {"mics_shard_size": 2, "stage": 0}):
        with pytest.raises(PlanError, match=f"mics_shard_size = {zero['mics_shard_size']} with stage"):
            made(8, **zero)


def test_nodes_that_keep_what_was_gathered_are_counted_and_must_fit() -> None:
    def made(**zero: Any) -> Any:
        asked = {"stage": 3, "param_persistence_threshold": 0} | zero
        return planned(8, train_batch_size=128, zero_optimization=asked)

    flat, near = made(), made(zero_hpz_partition_size=2)
    full = planned(1, train_batch_size=16, zero_optimization={"stage": 0}).memory.params_bytes
    assert flat.memory.params_bytes == 0
    assert near.memory.params_bytes >= full // 2  # a half each, and padding
    assert "kept by 2 ranks until the update" in str(near)
    assert "across nodes first" in str(made(mics_hierarchical_params_gather=True))
    for zero in (
        {"zero_hpz_partition_size": 3},
        {"zero_hpz_partition_size": 4, "mics_shard_size": 2},
        {"zero_hpz_partition_size": 2, "stage": 2},
        {"mics_hierarchical_params_gather": True, "stage": 1},
    ):
        with pytest.raises(PlanError, match=f"{next(iter(zero))} = .* with stage"):
            made(**zero)


def test_bytes_are_those_of_the_formats() -> None:
    full = planned(zero_optimization={"stage": 0}).memory
    assert (full.params_bytes, full.grads_bytes, full.master_bytes, full.optimizer_bytes) == (
        816 * 4,
        816 * 4,
        0,
        816 * 8,
    )
    half = planned(bf16={"enabled": True}).memory
    assert (half.params_bytes, half.master_bytes) == (816 * 2, 816 * 4)


def test_a_thousand_ranks_and_seventy_billion_parameters_plan_in_seconds() -> None:
    layers, width = 80, 8192
    params, modules = [], [ModuleInfo("")]
    for i in range(layers):
        modules.append(ModuleInfo(f"blocks.{i}"))
        for name, shape in (
            ("qkv", (3 * width, width)),
            ("out", (width, width)),
            ("up", (7 * width, width)),
            ("norm", (width,)),
        ):
            modules.append(ModuleInfo(f"blocks.{i}.{name}"))
            params.append(ParamInfo(f"blocks.{i}.{name}.weight", shape, "bfloat16", f"blocks.{i}.{name}", 0))
    modules.insert(1, ModuleInfo("blocks", callable=False))
    began = time.monotonic()
    config = load_config(
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    )
    plan = make_plan(config, Shapes(tuple(params), tuple(modules)), 1024)
    assert plan.batch.train == 1024
    assert 50e9 < sum(unit.numel for unit in plan.units) < 70e9
    assert plan.memory.total_bytes < 4 * 2**30
    assert time.monotonic() - began < 60  # a hang, not a speed


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(0, 3))
def test_any_world_that_fits_is_planned(world: int, micro: int, steps: int, stage: int) -> None:
    plan = planned(
        world,
        train_batch_size=micro * steps * world,
        gradient_accumulation_steps=steps,
        zero_optimization={"stage": stage},
    )
    assert (plan.batch.micro, plan.mesh.data) == (micro, world)
    assert len(plan.program.backwards(0)) == steps
    assert sum(unit.numel for unit in plan.units) == 816


def broken(world: int = 2, **changes: Any) -> DsError:
    with pytest.raises(DsError) as caught:
        planned(world, **changes)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "precision-both", "both true"),
        ({"data_types": {"param_dtype": "bf16"}}, "precision-param-dtype", "mode is fp32"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "precision-states", "bf16_master"),
        ({"fp16": {"auto_cast": True}}, "precision-off", "fp16.auto_cast"),
        ({"data_parallel_size": 4}, "mesh-size", "data_parallel_size = 4"),
        ({"train_batch_size": 10}, "batch-arithmetic", "10 / (accumulation 2 x ranks 2) = 2.5"),
        ({"train_batch_size": None}, "batch-missing", "gradient_accumulation_steps = 2"),
        ({"train_batch_size": -4}, "batch-positive", "train_batch_size = -4"),
        ({"optimizer": {"type": "AdamWW", "params": {}}}, "optimizer-type", "AdamWW"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, "optimizer-params", "momentun"),
        ({"optimizer": {"type": "MuSGD", "params": {}}}, "optimizer-unbuilt", "MuSGD"),
        *(
            ({"optimizer": {"type": "OneBitLamb"}} | changes, "optimizer-owns-reduction", said)
            for changes, said in (
                ({"zero_optimization": {"stage": 1}}, "stage = 1"),
                ({"communication_data_type": "bf16"}, "communication_data_type = bf16"),
                ({"prescale_gradients": True}, "prescale_gradients"),
                ({"sparse_gradients": True}, "sparse_gradients"),
                ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
                (
                    {"bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
                    "bf16_optimizer_states",
                ),
            )
        ),
        ({"scheduler": {"type": "StepLRR", "params": {}}}, "schedule-type", "StepLRR"),
        ({"scheduler": {"type": "StepLR", "params": {"step": 1}}}, "schedule-params", "'step'"),
    ],
)
def test_rules_say_what_was_found(changes: dict[str, Any], code: str, said: str) -> None:
    error = broken(**changes)
    assert error.code == code
    assert said in error.message
    assert error.fix


def test_all_broken_rules_are_one_error() -> None:
    error = broken(train_batch_size=10, fp16={"enabled": True}, bf16={"enabled": True}, optimizer={"type": "MuAdam"})
    assert isinstance(error, PlanError)
    assert error.code == "plan-rules"
    for code in ("precision-both", "batch-arithmetic", "optimizer-unbuilt"):
        assert code in error.message


def test_only_unbuilt_things_are_an_unsupported_error() -> None:
    assert isinstance(broken(optimizer={"type": "MuAdam", "params": {}}), UnsupportedError)


def test_shapes_come_from_meta_too() -> None:
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    assert shapes_of(model).numel == 1_001_000


LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def test_a_decoder_from_its_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    found = _shapes(list(decoder_shapes(LLAMA_70B)))
    assert found.numel == 70_553_706_496  # what the published model has
    assert len(found.params) == 723
    assert not next(m for m in found.modules if m.name == "model.layers").callable
    config = load_config(
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    )
    plan = make_plan(config, found, 1024)
    # 2 bytes of what gathers send, 4 each of gradient and master, 8 of Adam; padding, and what stays gathered.
    assert 17.9 * found.numel / 1024 < plan.memory.total_bytes < 18.5 * found.numel / 1024
    assert plan.memory.passing_bytes > 0
    small = {**LLAMA_70B, "model_type": "qwen2", "num_hidden_layers": 1, "tie_word_embeddings": True}
    names = [name for name, _, _ in decoder_shapes(small)]
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert "lm_head.weight" not in names
    with pytest.raises(UnsupportedError) as caught:
        list(decoder_shapes({"model_type": "mamba"}))
    assert caught.value.code == "plan-model"


def test_a_model_from_its_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = shapes_from(str(tmp_path))
    expected = shapes_of(model)
    assert sorted((p.name, p.shape, p.dtype) for p in found.params) == sorted(
        (p.name, p.shape, p.dtype) for p in expected.params
    )
    with pytest.raises(ConfigError):
        shapes_from(str(tmp_path / "no.json"))


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize("stage", [0, 2])
def test_expected_bytes_are_those_of_a_run(kind: str, stage: int) -> None:
    """World of one: what the plan expects is what is there after a step."""
    content = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    content["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    engine = ds_engine.initialize(model=model, config=content)[0]
    engine.backward(engine(torch.ones(4, 16, dtype=torch.bfloat16)).float().mean())
    engine.step()
    memory = engine.plan.memory
    units = engine.sharding.units
    states = [s.data.nbytes for s in engine.optimizer.shards() if s.shard.name.startswith("optim/")]
    assert sum(unit.full.nbytes for unit in units) == memory.params_bytes
    assert sum(unit.shard.nbytes for unit in units if not unit.plan.aliased) == memory.master_bytes
    assert sum(states) <= memory.optimizer_bytes <= sum(states) + 2 * 4 * 16 * len(units)  # padding
    engine.close()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"stages": 4}, "pipeline.stages = 4, the model has 2"),
        ({"partition": "uniform"}, "cut by 'parameters'"),
        ({"seed_layers": True}, "without seeds"),
    ],
)
def test_a_configuration_that_expects_another_cut_is_refused(section: dict[str, Any], said: str) -> None:
    cut = replace(shapes(), stages=2, staging=PipelineSpec("1f1b", 2, partition="parameters"))
    plain = load_config({"train_batch_size": 4, "pipeline": {"seed_layers": True}})
    assert make_plan(plain, shapes(), 2).staging is None  # a model without stages has no layers to be made
    agreed = {"stages": 2, "partition": "parameters", "seed_layers": False}
    assert make_plan(load_config({"train_batch_size": 4, "pipeline": agreed}), cut, 2).staging == cut.staging
    with pytest.raises(PlanError, match=said) as refused:
        make_plan(load_config({"train_batch_size": 4, "pipeline": section}), cut, 2)
    assert refused.value.code == "engine-stages"


@pytest.mark.parametrize(("stage", "microbatches", "moved"), [(1, 1, 2), (2, 1, 2), (1, 3, 4), (2, 3, 6), (3, 3, 6)])
def test_gradients_that_go_to_the_host_are_counted_as_they_travel(stage: int, microbatches: int, moved: int) -> None:
    """In bf16 after every backward, or once in fp32 where they add up on the device."""
    zero = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
    }
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    row = make_plan(load_config(content), shapes_of(model), 2).rows()["offload"]
    assert f"a step moves {moved * 8} KiB of gradients there and 16 KiB of parameters back" in row


def test_how_files_lie_is_told_where_none_are_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    zero = {"stage": 1, "round_robin_gradients": True, "parameter_alignment": True, "sub_group_size": 50}
    document = {"train_batch_size": 4, "zero_optimization": zero}
    load_config(document | {"checkpoint": {"layout": "deepspeed"}})
    assert "has no effect" not in caplog.text
    load_config(document)
    for key in ("round_robin_gradients", "parameter_alignment", "sub_group_size"):
        assert f"zero_optimization.{key} has no effect" in caplog.text


def test_parameters_may_have_formats_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shapes = replace(shapes_of(model), formats=(("*.bias", "float32"),))
    plan = make_plan(load_config({"train_batch_size": 4, "bf16": {"enabled": True}}), shapes, 2)
    assert "parameters bfloat16, " in plan.rows()["precision"]
    assert "*.bias float32" in plan.rows()["precision"]
    assert {unit.dtypes.param for unit in plan.units} == {torch.bfloat16, torch.float32}
