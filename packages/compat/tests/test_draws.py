"""Classes draw at construction in upstream's order: a digest of a model's parameters, and of the numbers that come after them.

`python test_draws.py FILE` records them with the `deepspeed` that is installed; data/draws.json was recorded with DeepSpeed 0.19.8 and
torch 2.13 on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.linear import LoRAConfig, OptimizedLinear
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def pipeline(method: str = "parameters") -> nn.Module:
    layers = [
        LayerSpec(nn.Linear, 4, 4), nn.ReLU(), TiedLayerSpec("e", nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("e", nn.Linear, 4, 4), nn.Linear(4, 2),
    ]  # fmt: skip
    return PipelineModule(layers=layers, num_stages=1, loss_fn=nn.MSELoss(), partition_method=method)


def lora() -> nn.Module:
    return OptimizedLinear(8, 12, lora_config=LoRAConfig(lora_r=4), dtype=torch.float32)


def on_device() -> nn.Module:
    with deepspeed.OnDevice(dtype=torch.float32, device="cpu"):
        return mlp()


def cut_while_built() -> nn.Module:
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}):
        made = mlp()
    with deepspeed.zero.GatheredParameters(list(made.parameters())):
        plain = nn.ParameterList([nn.Parameter(param.detach().clone()) for param in made.parameters()])
    return plain


def started(build: Callable[[], nn.Module], stage: int) -> Callable[[], nn.Module]:
    """The model within an engine, where its parameters are whole."""

    def make() -> nn.Module:
        model = build()
        config = {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {}},
            "zero_optimization": {"stage": stage},
        }
        if isinstance(model, PipelineModule) or stage == 0:
            config |= {"zero_allow_untested_optimizer": True}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine.module

    return make


CASES: dict[str, Callable[[], nn.Module]] = {
    "MoE": lambda: MoE(8, mlp(), num_experts=4),
    "MoE, residual": lambda: MoE(8, mlp(), num_experts=2, k=2, use_residual=True),
    "MoE, noisy": lambda: MoE(8, mlp(), num_experts=2, noisy_gate_policy="RSample"),
    "TiledLinear": lambda: deepspeed.zero.TiledLinear(8, 12, in_splits=2, out_splits=3),
    "TiledLinear, of a layer": lambda: deepspeed.zero.TiledLinear(8, 12, in_splits=2, init_linear=nn.Linear(8, 12)),
    "OptimizedLinear": lambda: OptimizedLinear(8, 12, dtype=torch.float32),
    "OptimizedLinear, LoRA": lora,
    "LinearModuleForZeroStage3": lambda: LinearModuleForZeroStage3(8, 12),
    "OnDevice": on_device,
    "PipelineModule": pipeline,
    "PipelineModule, uniform": lambda: pipeline("uniform"),
    "zero.Init": cut_while_built,
    "initialize, stage 0": started(lambda: MoE(8, mlp(), num_experts=4), 0),
    "initialize, stage 1": started(mlp, 1),
    "initialize, stage 2": started(mlp, 2),
    "initialize, pipeline": started(pipeline, 1),
}


def digest(case: str) -> str:
    """Of the parameters in their order, and of the next random numbers."""
    torch.manual_seed(11)
    model = CASES[case]()
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().float().numpy().tobytes())
    found.update(torch.rand(3).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_a_model_begins_with_upstreams_numbers(case):
    recorded = json.loads((Path(__file__).parent / "data" / "draws.json").read_text())
    assert digest(case) == recorded[case]


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    deepspeed.init_distributed("gloo")
    Path(sys.argv[1]).write_text(json.dumps({case: digest(case) for case in CASES}, indent=1) + "\n")
