"""Activation checkpointing by configuration: the same training at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_engine
import ds_parallel
from ds_testing import world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Blocks that are checkpointed by name, and one that the forward checkpoints itself if it is told to."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.own, self.layers, self.last = own, nn.ModuleList(Block() for _ in range(3)), Block()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (ds_parallel.checkpoint(self.last, x) if self.own else self.last(x)).square().mean()


def trained(stage: int, section: dict[str, Any], own: bool = False) -> tuple[list[float], dict[str, Tensor], Any]:
    model = Model(own)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": section,
    }
    engine, *_ = ds_engine.initialize(model=model, config=config)
    torch.manual_seed(10 + engine.mesh.rank)
    losses = []
    for _ in range(4):
        loss = engine(torch.randn(2, 8))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    found, policy = engine.full_state_dict(), engine.activations
    kinds = {type(layer) for layer in model.layers}
    engine.close()
    assert {type(layer) for layer in model.layers} == {Block}
    assert (kinds == {Block}) == ("modules" not in section)
    return losses, found, policy


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_training_is_the_same_at_every_stage(stage: int) -> None:
    plain = trained(stage, {})
    buffers = {"contiguous_memory_optimization": True, "number_checkpoints": 4}
    for section in ({"modules": ["layers.*"]}, {"modules": ["layers.*"], **buffers}):
        losses, found, policy = trained(stage, section, own=True)
        assert losses == plain[0]
        assert all(torch.equal(value, found[name]) for name, value in plain[1].items())
        assert policy.calls == 4 * 4
        assert policy.account.peak_device == (4 * 2 * 8 * 4 if "number_checkpoints" in section else 0)
