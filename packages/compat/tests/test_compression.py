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
