"""What programs written for upstream see of a model besides its weights: its counters at the start, its gradients, timers."""

from __future__ import annotations

import random

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
