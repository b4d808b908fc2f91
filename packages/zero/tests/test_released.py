"""The refusing class itself, without any unit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero.runtime.released import Released, keep, release, restore, unkeep


class Keeper:
    def __init__(self, gathers):
        self.gathers, self.asked = gathers, []

    def touched(self, param, what):
        self.asked.append(what)
        if self.gathers:
            restore(param)
        return self.gathers

    def used(self, param):
        pass

    def name_of(self, param):
        return "layer.weight"


def released(gathers=False):
    param = Parameter(torch.arange(6.0).view(2, 3))
    keep(param, Keeper(gathers))
    release(param)
    return param


def test_metadata_is_answered_without_asking():
    param = released()
    assert (param.shape, param.size(1), param.dtype, param.numel(), param.is_leaf) == (
        (2, 3),
        3,
        torch.float32,
        6,
        True,
    )
    assert param.grad is None
    param.requires_grad_(False)
    assert not param.requires_grad
    assert isinstance(param, Parameter)
    assert len({param, param}) == 1


def test_use_is_refused_with_name_operation_and_fix():
    with pytest.raises(ShardedAccessError) as told:
        torch.cat([torch.zeros(2, 3), released()])
    assert "layer.weight (2, 3) was used by 'cat'" in str(told.value)
    assert "GatheredParameters" in str(told.value)


def test_a_keeper_that_gathers_lets_the_use_go_on():
    param = released(gathers=True)
    assert torch.equal(param + 1, torch.arange(1.0, 7.0).view(2, 3))
    assert type(param) is Parameter


def test_nested_arguments_are_found():
    with pytest.raises(ShardedAccessError):
        torch.nn.functional.linear(input=torch.ones(1, 3), weight=released())


def test_restored_and_forgotten_nothing_is_left():
    param = released()
    restore(param)
    unkeep(param)
    assert type(param) is Parameter
    assert not param.__dict__
    assert not isinstance(param, Released)
    assert param.sum() == 15
