"""The refusing class itself, without any unit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import Parameter

from ds_config.errors import ShardedAccessError
from ds_zero.runtime import sharded_parameter as answers
from ds_zero.runtime.sharded_parameter import (
    Placeholder,
    ShardedParameter,
    keep,
    placeholder_of,
    release,
    restore,
    unkeep,
)


class Keeper(answers.AccessHandler):
    def __init__(self, gathers):
        self.gathers, self.asked = gathers, []

    def on_access(self, param, what):
        self.asked.append(what)
        if self.gathers:
            restore(param)
        return self.gathers

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


class Showing(Keeper):
    def materialize(self, param, what):
        self.asked.append(what)
        return placeholder_of(param, "layer.weight")


def showing():
    param = Parameter(torch.arange(6.0).view(2, 3))
    param.ds_shape, param._own = param.shape, "ours"
    keep(param, Showing(False))
    release(param)
    return param


LOOKS = {
    "detach": lambda p: p.detach(), "data": lambda p: p.data, "clone": lambda p: p.clone(), "torch.clone": torch.clone,
    "cpu": lambda p: p.cpu(), "to": lambda p: p.to(torch.float32), "twice": lambda p: p.detach().clone().to("cpu"),
    "deepcopy": lambda p: copy.deepcopy(p.detach()), "parameter": lambda p: Parameter(p.detach(), requires_grad=False),
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_who_only_looks_gets_an_empty_tensor_that_says_what_it_stands_for(look):
    shown = LOOKS[look](showing())
    assert isinstance(shown, Placeholder)
    assert (shown.shape, shown.dtype, shown.numel(), shown.ds_shape) == ((0,), torch.float32, 0, (2, 3))
    assert not hasattr(shown, "_own")
    assert "layer.weight" in repr(shown)
    assert len({shown, shown}) == 1
    for compute in (
        lambda t: t + 1,
        lambda t: torch.cat([t, t]),
        lambda t: torch.zeros(0).add_(t),
        lambda t: t.tolist(),
    ):
        with pytest.raises(ShardedAccessError, match=r"layer\.weight \(2, 3\) was used by"):
            compute(shown)
    assert shown.to(torch.bfloat16).dtype is torch.bfloat16


def test_questions_of_type_and_shape_need_no_values():
    param = showing()
    assert torch.zeros_like(param).shape == param.new_empty((2, 3)).shape == (2, 3)
    assert torch.ones(2, dtype=torch.float64).to(param).dtype is torch.float32


def test_files_hold_plain_empty_tensors():
    model = torch.nn.Linear(3, 2)
    keep(model.weight, Showing(False))
    release(model.weight)
    for saved in (model.state_dict(), {"weight": model.weight}):
        torch.save(saved, file := io.BytesIO())
        file.seek(0)
        assert torch.load(file, weights_only=True)["weight"].shape == (0,)


def test_a_model_that_is_where_it_should_be_is_moved_there_and_not_converted():
    model = torch.nn.Linear(3, 2)
    keep(model.weight, Showing(False))
    release(model.weight)
    assert model.to("cpu").weight is model.weight
    assert type(model.weight) is ShardedParameter
    with pytest.raises(ShardedAccessError, match="data"):
        model.half()


def test_nested_arguments_are_found():
    with pytest.raises(ShardedAccessError):
        torch.nn.functional.linear(input=torch.ones(1, 3), weight=released())


def test_restored_and_forgotten_nothing_is_left():
    param = released()
    restore(param)
    unkeep(param)
    assert type(param) is Parameter
    assert not param.__dict__
    assert not isinstance(param, ShardedParameter)
    assert param.sum() == 15
