"""A transform: parameters of norms stay as they are. The class of docs/how-to/add-a-transform.md, in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import torch
from torch import nn

import ds_engine
from ds_engine.transforms import TRANSFORMS, BuildContext, Transform, TransformInput
from ds_testing import world


class FreezeNorms(Transform[tuple[str, ...], list[nn.Parameter]]):
    name = "freeze norms"

    def decide(self, asked: TransformInput) -> tuple[str, ...] | None:
        return tuple(info.name for info in asked.shapes.params if "norm" in info.name) or None

    def plan_rows(self, what: tuple[str, ...]) -> Mapping[str, str]:
        return {"frozen": f"{len(what)} parameters of norms"}

    def apply(self, what: tuple[str, ...], site: BuildContext) -> list[nn.Parameter]:
        changed = [param for name, param in site.model.named_parameters() if name in what]
        for param in changed:
            param.requires_grad_(False)
        return changed

    def undo(self, made: list[nn.Parameter]) -> None:
        for param in made:
            param.requires_grad_(True)


@world(1, backend=None)
def test_an_engine_with_it_leaves_norms_alone():
    model = nn.Sequential()
    model.add_module("norm", nn.LayerNorm(4))
    model.add_module("out", nn.Linear(4, 1))
    before = [param.detach().clone() for param in model.parameters()]
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    with (
        mock.patch.multiple("ds_engine.planner", TRANSFORMS=(FreezeNorms(), *TRANSFORMS)),
        mock.patch.multiple("ds_engine.builder", TRANSFORMS=(FreezeNorms(), *TRANSFORMS)),
    ):
        engine, *_ = ds_engine.initialize(model=model, config=config)
    assert "2 parameters of norms" in str(engine.plan)
    engine.backward(engine(torch.randn(1, 4)).sum())
    engine.step()
    engine.close()
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert same == [True, True, False, False]
    assert all(param.requires_grad for param in model.parameters())
