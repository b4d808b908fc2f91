"""`deepspeed.compression`: scripts that compressed before it was removed upstream run again."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import convert_conv1d_to_linear
from deepspeed.compression.scheduler import compression_scheduler
from torch import nn

from ds_config.errors import UnsupportedError

CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_weight_in_forward": True},
            "different_groups": {"wq1": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}},
        },
        "row_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 2, "method": "topk"},
            "different_groups": {"rp1": {"params": {"dense_ratio": 0.5}, "modules": ["0"], "related_modules": [["2"]]}},
        },
    },
}


def test_the_usual_script_runs() -> None:
    torch.manual_seed(0)
    model = init_compression(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), CONFIG)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for _ in range(4):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.compression_scheduler.training_steps == 4
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = engine.eval()(x)
    engine.close()
    redundancy_clean(model, CONFIG)
    assert model[0].weight.shape == (8, 8)
    torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


def test_an_engine_compresses_by_itself_too() -> None:
    config = {
        **CONFIG,
        "compression_training": {"weight_quantization": CONFIG["compression_training"]["weight_quantization"]},
    }
    model = nn.Sequential(nn.Linear(8, 2))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert engine.compression_scheduler.training_steps == 0
    assert compression_scheduler(model).layers == engine.compression_scheduler.layers
    engine.close()
    assert convert_conv1d_to_linear(nn.ReLU()) is not None


def test_a_teacher_engine_of_the_same_configuration_is_not_compressed_and_heads_are_counted_by_the_program() -> None:
    def build(layers: int) -> nn.Module:
        torch.manual_seed(layers)
        model = nn.Module()
        model.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(8, 8), "o": nn.Linear(8, 8)}) for _ in range(layers))
        for layer in model.layers:
            layer.num_attention_heads = 4
        return model

    reduction = {"enabled": True, "keep_number_layer": 1, "module_name_prefix": "layers", "teacher_layer": [1]}
    heads = {"shared_parameters": {"enabled": True, "method": "topk", "num_heads": 4, "schedule_offset": 0}, "different_groups": {
        "h": {"params": {"dense_ratio": 0.5}, "modules": ["o"], "related_modules": [["q"]]}}}  # fmt: skip
    config = {"train_batch_size": 1, "compression_training": {"layer_reduction": reduction, "head_pruning": heads}}
    student, teacher = build(1), build(2)
    init_compression(student, config, teacher_model=teacher)
    engine, *_ = deepspeed.initialize(model=teacher, config=config)
    assert not list(compression_scheduler(teacher).layers)
    engine.close()
    assert redundancy_clean(student, config).layers[0]["o"].weight.shape == (8, 4)
    assert student.layers[0].num_attention_heads == 4
    alone = {**config, "compression_training": {"layer_reduction": reduction}}
    fewer = init_compression(build(1), alone, teacher_model=teacher)
    engine, *_ = deepspeed.initialize(model=fewer, config=alone)
    assert redundancy_clean(engine, alone) is engine


def test_moq_is_asked_for_by_quantize_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "quantize_training": {
            "enabled": True,
            "quantize_groups": 4,
            "quantize_bits": {"start_bits": 10, "target_bits": 7},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
            "quantize_algo": {"q_type": "asymmetric", "rounding": "nearest"},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    told = []
    for _ in range(6):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        told.append(model[2].compression.bits.bits)
    assert told == [10, 9, 8, 8, 7, 7]  # the first bit after one step, the next after two more, then four
    engine.close()
    redundancy_clean(model)
    rows = model[2].weight.detach().view(4, -1)
    assert all(len(row.unique()) <= 2**7 for row in rows)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        deepspeed.initialize(
            model=nn.Linear(2, 2),
            config={**config, "quantize_training": {"enabled": True, "eigenvalue": {"enabled": True}}},
        )


def test_classes_of_layers_are_refused_by_name() -> None:
    with pytest.raises(ImportError, match="init_compression"):
        from deepspeed.compression.basic_layer import LinearLayer_Compress  # noqa: F401
