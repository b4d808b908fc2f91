"""A trace for tensor-parallel rules runs a model's code, and changes nothing of the model's."""

from __future__ import annotations

import random
import threading

import numpy
import torch
from torch import Tensor, nn

from ds_parallel.tensor import ShardKind, TensorOptions, facts_of, make_tensor_plan
from ds_parallel.tensor.model_copy import copy_model


class Noting(nn.Module):
    """A block that writes whatever a forward can write."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.inside = nn.ReLU()
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.seen, self.lock = 0, [], threading.Lock()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.inside.count = self.count
        self.calls.add_(1.0)
        self.seen.append(self.count)
        self.drawn = torch.rand(2), random.random(), numpy.random.rand(), torch.rand(2, generator=self.generator)
        return self.b(self.inside(self.a(x)))


def draws(model: Noting) -> list[float]:
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state(), model.generator.get_state()
    drawn = [float(torch.rand(())), random.random(), numpy.random.rand()]
    drawn.append(float(torch.rand((), generator=model.generator)))
    torch.set_rng_state(streams[0]), random.setstate(streams[1]), numpy.random.set_state(streams[2])
    model.generator.set_state(streams[3])
    return drawn


def test_a_trace_changes_nothing_of_a_model() -> None:
    model = Noting()
    before, names = draws(model), set(vars(model))
    plan = make_tensor_plan(facts_of(model), TensorOptions(degree=2))
    assert {d.name: d.kind for d in plan.cut} == {"a": ShardKind.COLUMN, "b": ShardKind.ROW}  # it was traced
    assert (model.count, model.seen, float(model.calls)) == (0, [], 0.0)
    assert set(vars(model)) == names
    assert not hasattr(model.inside, "count")
    assert draws(model) == before


def test_a_copy_has_the_models_parameters_and_its_own_rest() -> None:
    model = Noting()
    model.inside.owner = [model]  # a circle
    model.result = model.a.weight * 2.0  # deepcopy refuses what has a graph
    copied = copy_model(model)
    assert copied.a.weight is model.a.weight
    assert copied.lock is model.lock
    assert copied.inside.owner[0] is copied
    copied(torch.ones(1, 4))
    copied.result.zero_()
    assert model.count == 0
    assert model.result.abs().sum() > 0
    assert not model.seen


RUN: list[int] = []


class Global(Noting):
    def forward(self, x: Tensor) -> Tensor:
        RUN.append(1)
        return super().forward(x)


def test_facts_without_structure_run_no_code() -> None:
    RUN.clear()
    assert facts_of(Global(), structure=False).structure == ()
    assert not RUN
    assert facts_of(Global()).structure
    assert RUN
