"""What programs written for upstream see of a model besides its weights: its counters at the start, its gradients, timers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_testing import world


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls.add_(1.0)
        return self.b(torch.relu(self.a(x))) + 0.0 * (random.random() + float(torch.rand(())))


def settings(stage: int, **changes: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@world(2)
def test_initialize_runs_nothing_of_the_model(stage: int) -> None:
    import deepspeed

    model = Counting()
    torch.manual_seed(5), random.seed(5)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(5), random.seed(5)
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage))
    assert (float(torch.rand(())), random.random()) == expected
    assert (model.count, float(model.calls)) == (0, 0.0)
    engine.destroy()


@pytest.mark.parametrize(("asked", "low"), [(None, ("a.", "b.")), (["torch.nn.LayerNorm"], ("norm.",)), ([], ())])
@world(2)
def test_gradients_of_safe_modules_travel_in_autocasts_format(asked: list[str] | None, low: tuple[str, ...]) -> None:
    import deepspeed
    from deepspeed.runtime.torch_autocast import get_all_comm_dtypes, get_comm_dtype, has_comm_dtype

    model = Counting()
    model.norm = nn.LayerNorm(4)
    section = {"enabled": True, "dtype": "bfloat16"}
    section |= {} if asked is None else {"lower_precision_safe_modules": asked}
    engine, *_ = deepspeed.initialize(model=model, config=settings(2, torch_autocast=section))
    for name, param in engine.module.named_parameters():
        assert has_comm_dtype(param) is name.startswith(low or ("-",)), name
        assert get_comm_dtype(param) is (torch.bfloat16 if has_comm_dtype(param) else torch.float32)
    assert (torch.bfloat16 in get_all_comm_dtypes(engine.module.parameters())) is bool(low)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.destroy()


class Adapted(nn.Module):
    """Layers with fp32 adapters beside them, as PEFT makes them of a model that transformers loaded."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).requires_grad_(False)
        self.adapters = nn.ParameterList(torch.full((4, 4), 0.1) for _ in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            assert adapter.dtype == torch.float32
            x = layer(x) + (x.float() @ adapter).bfloat16()
        return x.float().square().mean()


@pytest.mark.parametrize("inside", [False, True])
@world(2)
def test_fp32_parameters_beside_those_made_inside_init_keep_their_format(inside: bool) -> None:
    import deepspeed

    config = settings(3, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=inside):
        layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
    model = Adapted(layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.adapters.parameters(), config=config)
    formats = {p.dtype for p in model.adapters.parameters()}, {p.dtype for p in model.layers.parameters()}
    assert formats == ({torch.float32 if inside else torch.bfloat16}, {torch.bfloat16})
    if inside:
        before = engine.full_state_dict()["adapters.1"].clone() if engine.mesh.rank == 0 else engine.full_state_dict()
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)))
        engine.step()
        after = engine.full_state_dict()
        if engine.mesh.rank == 0:
            assert not torch.equal(after["adapters.1"], before)
            assert not torch.equal(after["adapters.1"], after["adapters.1"].bfloat16().float())
    engine.destroy()


@world(2)
def test_a_head_that_is_trained_beside_a_body_made_inside_init_has_the_body_format() -> None:
    import deepspeed

    config = settings(3, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=config):
        body = nn.Linear(4, 4)
    model = nn.Sequential(body, nn.Linear(4, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().mean())
    engine.step()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine.destroy()


class Buffered(nn.Module):
    """Buffers as models make them: by a constructor, computed from one, and computed in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.sin(torch.arange(0.0, 4.0)).view(1, 4, 1) * torch.ones(1))
        self.register_buffer("wide", 1.0 / 10.0 ** (torch.arange(0, 4).float() / 4.0))
        self.register_buffer("chosen", torch.zeros(2).to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.table


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@world(2)
def test_buffers_made_inside_init_have_the_parameters_format(stage: int) -> None:
    import deepspeed

    config = settings(stage, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=config):
        torch.manual_seed(0)
        model = Buffered()
    plain = torch.nn.BatchNorm1d(4)
    assert plain.running_mean.dtype is torch.float32
    formats = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    narrow = {"norm.running_mean", "norm.running_var", "table"}
    assert formats == {name: torch.bfloat16 if name in narrow else torch.float32 for name in formats}
    assert torch.equal(model.table, torch.sin(torch.arange(4.0)).view(1, 4, 1).bfloat16())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    out = engine(torch.randn(2, 3, 8).bfloat16())
    assert out.dtype is torch.bfloat16
    engine.backward(out.float().square().mean())
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("keep", ["auto", ["mean", "conv.tab*"], []])
@world(2)
def test_buffers_that_stay_fp32_inside_init(keep: object) -> None:
    import deepspeed

    class Listed(nn.Module):
        _keep_in_fp32_modules_strict = ("running_mean",)
        _keep_in_fp32_modules = ("table",)  # for fp16 only

        def __init__(self) -> None:
            super().__init__()
            self.inner = Buffered()

    config = settings(3, bf16={"enabled": True}, data_types={"keep_in_fp32_modules": keep})
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Listed()
    wide = {"inner.norm.running_mean"} if keep else set()
    narrow = {"inner.norm.running_mean", "inner.norm.running_var", "inner.table"} - wide
    formats = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    assert formats == {name: torch.bfloat16 if name in narrow else torch.float32 for name in formats}


REPLACED: dict[str, Callable[[Any], Any]] = {
    # As transformers wraps the name before it enters Init: `torch.arange` keeps its format.
    "transformers": lambda wrap: (
        lambda fn, *args, **options: partial(fn) if fn is torch.arange else wrap(fn, *args, **options)
    ),
    "nothing": lambda wrap: lambda fn, *args, **options: fn,
    "upstream": lambda wrap: wrap,
}


@pytest.mark.parametrize(
    ("replaced", "narrow"),
    [
        ("transformers", {"norm.running_mean", "norm.running_var"}),
        ("nothing", set()),
        ("upstream", {"norm.running_mean", "norm.running_var", "table"}),
    ],
)
@world(1)
def test_a_client_decides_which_constructors_are_narrow(replaced: str, narrow: set[str], monkeypatch: Any) -> None:
    """Transformers' tables of rotations were bf16 where it had asked for fp32: far positions were wrong, in silence."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters as pp

    wrap = pp.zero_wrapper_for_fp_tensor_constructor
    monkeypatch.setattr(pp, "zero_wrapper_for_fp_tensor_constructor", REPLACED[replaced](wrap))
    with deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True})):
        model = Buffered()
    formats = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    assert formats == {name: torch.bfloat16 if name in narrow else torch.float32 for name in formats}
    assert wrap(torch.ones, torch.bfloat16)(3).dtype is torch.bfloat16
    assert wrap(torch.ones, None, torch.device("meta"))(3).is_meta
    with deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True}), tensor_overrides=()):
        model = Buffered()
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {torch.float32}


@world(1)
def test_tables_of_rotations_are_fp32_as_transformers_asks() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    init = deepspeed.zero.Init(config_dict_or_path=settings(3, bf16={"enabled": True}))
    with integration.prevent_arange_dtype_change(), init:  # as from_pretrained enters them
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **size))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


class Sinusoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_format_but_beside_running_statistics_or_where_the_configuration_says_theirs(
    stage: int,
) -> None:
    import deepspeed

    config = settings(stage, bf16={"enabled": True})
    narrow = config | {"data_types": {"buffer_dtype": "bf16"}}
    for model, chosen in ((Sinusoid(), narrow), (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), config)):
        engine, *_ = deepspeed.initialize(model=model, config=chosen)
        loss = engine(torch.ones(2, 4).bfloat16()).sum()
        assert loss.dtype is torch.bfloat16
        engine.backward(loss)
        engine.step()
        engine.destroy()
    engine, *_ = deepspeed.initialize(model=Sinusoid(), config=config)
    assert engine.module.table.dtype is torch.float32
    assert engine._config.buffer_dtype is engine._config.param_dtype is None
    with pytest.raises(RuntimeError, match="dtype") as error:
        engine(torch.ones(2, 4).bfloat16())
    assert "1 floating-point buffers are wider (table)" in error.value.__notes__[0]
    assert 'data_types.buffer_dtype = "bf16"' in error.value.__notes__[0]
    engine.destroy()


def test_buffers_of_transformers_models_keep_their_format() -> None:
    import deepspeed

    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    engine, *_ = deepspeed.initialize(model=model, config=settings(1, bf16={"enabled": True}))
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert "buffers as the model (data_types.buffer_dtype)" in str(engine.plan)
    engine.destroy()


def test_a_section_for_the_models_author_and_an_mpu_are_taken() -> None:
    import deepspeed

    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    section = {"sparse_attention": {"mode": "fixed", "block": 16}}
    engine, *_ = deepspeed.initialize(model=Sinusoid(), config=settings(0, **section), mpu=mpu)
    assert engine.mpu is mpu
    assert engine.config["sparse_attention"]["mode"] == "fixed"
    engine.destroy()


@world(1)
def test_unused_parameters_are_an_assertion_where_upstream_looks_for_them() -> None:
    import deepspeed

    config = settings(2)
    config["zero_optimization"] = {"stage": 2, "cpu_offload": True, "ignore_unused_parameters": False}
    engine, *_ = deepspeed.initialize(model=Counting(), config=config)
    for used in (True, False):
        engine.backward(engine(torch.ones(2, 4)).sum() if used else engine.module.a(torch.ones(2, 4)).sum())
        if used:
            engine.step()
    with pytest.raises(AssertionError, match=r"ignore_unused_parameters.*b\.weight"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_throughput_timer_counts_steps(accumulation: int) -> None:
    import deepspeed

    config = settings(1, gradient_accumulation_steps=accumulation)
    engine, *_ = deepspeed.initialize(model=Counting(), config=config)
    timer = engine.tput_timer
    assert timer.batch_size == 2 * accumulation
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4 * accumulation):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert (timer.global_step_count, timer.micro_step_count) == (4, 4 * accumulation)
    assert timer.total_elapsed_time > 0.0
    assert timer.avg_samples_per_sec() == pytest.approx(2 * 2 * accumulation / timer.total_elapsed_time)
    timer.stop(global_step=True)  # without a start
    assert (timer.global_step_count, timer.started, timer.step_elapsed_time) == (4, False, 0.0)
    engine.destroy()


def test_values_of_activation_checkpointing_follow_configure() -> None:
    import deepspeed
    from deepspeed._ours.training_engine import activation_checkpointing_api as api

    names = (
        "PARTITION_ACTIVATIONS",
        "CPU_CHECKPOINT",
        "CONTIGUOUS_CHECKPOINTING",
        "SYNCHRONIZE",
        "PROFILE_TIME",
        "num_layers",
    )

    def found() -> list[object]:
        return [getattr(deepspeed.checkpointing, name) for name in names]

    before, api._process = api._process, api._Process()
    try:
        assert found() == [False, False, False, False, False, None]
        assert deepspeed.checkpointing.deepspeed_checkpointing_enabled is False
        deepspeed.checkpointing.configure(
            None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3, checkpoint_in_cpu=True
        )
        assert found() == [True, True, True, False, False, 3]
        assert deepspeed.runtime.activation_checkpointing.checkpointing.num_layers == 3
        assert (deepspeed.checkpointing.mpu, deepspeed.checkpointing.mp_size) == (None, 1)
        deepspeed.checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"profile": True}})
        assert found() == [False, False, False, False, True, None]
        deepspeed.checkpointing.set_num_layers(5)
        assert deepspeed.checkpointing.num_layers == 5
        assert deepspeed.checkpointing.deepspeed_checkpointing_enabled is True
    finally:
        api._process = before


@pytest.mark.parametrize("stage", [0, 3])
def test_loops_set_the_counters(stage: int) -> None:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=Counting(), config=settings(stage, gradient_accumulation_steps=2))

    def micro() -> tuple[bool, int, int]:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        return engine.is_gradient_accumulation_boundary(), engine.micro_steps, engine.global_steps

    assert [micro() for _ in range(3)] == [(True, 1, 0), (False, 2, 1), (True, 3, 1)]
    engine.zero_grad()
    engine.micro_steps = 0  # an epoch begins: what the last one left is dropped
    assert [micro() for _ in range(2)] == [(True, 1, 1), (False, 2, 2)]
    engine.micro_steps = 7
    assert micro() == (False, 8, 3)
    micro()
    engine.global_steps, engine.global_samples, engine.skipped_steps = 0, 100, 1
    assert micro() == (False, 10, 1)
    assert (engine.global_samples, engine.skipped_steps) == (104, 1)
    engine.destroy()


@world(2)
def test_the_format_of_communication_is_set_to_what_it_is() -> None:
    import deepspeed

    model = nn.ModuleList([Counting().bfloat16(), nn.Linear(2, 2).requires_grad_(False)])
    engine, *_ = deepspeed.initialize(model=model, config=settings(0))
    assert engine.communication_data_type == torch.float32
    engine.communication_data_type = torch.bfloat16  # as qlora-pipe and diffusion-pipe do
    assert engine.communication_data_type == torch.bfloat16
    with pytest.raises(ValueError, match=r"travel in torch\.bfloat16"):
        engine.communication_data_type = torch.float32
    engine.destroy()


@world(2)
def test_what_a_program_puts_in_place_of_the_gathering_of_weights_is_called(tmp_path: Path) -> None:
    """MS-SWIFT leaves frozen weights out of what accelerate and `save_16bit_model` gather at stage 3 by a method of its own on the engine."""
    import deepspeed

    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config=settings(3, zero_optimization=zero))
    gather = engine._zero3_consolidated_16bit_state_dict
    engine._zero3_consolidated_16bit_state_dict = lambda exclude_frozen_parameters=False: gather(True)
    state = engine._consolidated_16bit_state_dict()
    engine.save_16bit_model(str(tmp_path), "model.bin")
    if torch.distributed.get_rank() == 0:
        assert set(state) == set(torch.load(tmp_path / "model.bin")) == {"1.weight", "1.bias"}
    engine.destroy()
