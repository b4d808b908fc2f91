"""A policy: the mean of a model's weights over its updates is kept beside it. This file; nothing in the engine knows of it."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor, nn

import ds_engine
from ds_engine.transforms import TRANSFORMS, BuildContext, Transform, TransformInput
from ds_testing import world


class Average:
    """What goes on with the updates of a run: a `Follower`."""

    def __init__(self, params: list[nn.Parameter], decay: float) -> None:
        self.params, self.decay = params, decay
        self.kept: list[Tensor] = [param.detach().clone() for param in params]

    def step(self) -> None:
        for kept, param in zip(self.kept, self.params, strict=True):
            kept.lerp_(param.detach(), 1 - self.decay)

    def resume(self, steps: int) -> None:
        self.kept = [param.detach().clone() for param in self.params]


class Averaging(Transform[float, None]):
    name = "average of the weights"

    def decide(self, asked: TransformInput) -> float:
        return 0.5

    def apply(self, what: float, site: BuildContext) -> None:
        site.followers.append(Average(list(site.model.parameters()), what))

    def undo(self, made: None) -> None: ...


@world(1, backend=None)
def test_it_follows_every_update():
    with (
        mock.patch.multiple("ds_engine.planner", TRANSFORMS=(Averaging(), *TRANSFORMS)),
        mock.patch.multiple("ds_engine.builder", TRANSFORMS=(Averaging(), *TRANSFORMS)),
    ):
        model = nn.Linear(2, 1, bias=False)
        start = model.weight.detach().clone()
        config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        engine, *_ = ds_engine.initialize(model=model, config=config)
        engine.backward(engine(torch.full((1, 2), 0.5)).sum())
        engine.step()
        average = engine.follower(Average)
        torch.testing.assert_close(average.kept[0], start - 0.25)
        engine.close()
