"""What a start leaves as it was: counters, buffers, lists and random streams of the model and of the process."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

import ds_engine
from ds_testing import world


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls.add_(1.0)
        self.seen.append(random.random() + numpy.random.rand() + float(torch.rand(())))
        return self.b(torch.relu(self.a(x)))


def seeded_draws() -> list[float]:
    return [float(torch.rand(())), random.random(), numpy.random.rand()]


def check(initialize, stage: int, **more: object) -> None:
    model = Counting()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(11)
    expected = seeded_draws()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(11)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        **more,
    }
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert seeded_draws() == expected
    assert (model.count, float(model.calls), model.seen) == (0, 0.0, [])
    engine(torch.ones(2, 4))
    assert (model.count, float(model.calls)) == (1, 1.0)
    engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_a_start_runs_nothing_of_the_model(stage: int) -> None:
    check(ds_engine.initialize, stage)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
@world(2)
def test_a_start_on_two_ranks_leaves_the_model_as_it_was(degree: int, stage: int) -> None:
    more = {"tensor_parallel": {"autotp_size": 2}} if degree == 2 else {}
    check(ds_engine.initialize, stage, **more)
