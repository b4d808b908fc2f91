"""What a package says of its parameters is what ds-zero reads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parameter import Parameter

from ds_comm import Box, Interval, ParamSharding, ReductionGroup, param_sharding, self_group, set_param_sharding
from ds_comm.reduction_group import logical_of
from ds_config.errors import PlanError


def test_without_a_word_a_parameter_is_dense_and_whole() -> None:
    found = param_sharding(Parameter(torch.zeros(2)))
    assert (found.family, found.name, found.shape, found.box) == (None, None, None, None)


def test_the_last_word_counts() -> None:
    param = Parameter(torch.zeros(2, 4))
    family = ReductionGroup("tensor", self_group(), divisor=4)
    set_param_sharding(param, ParamSharding(name="old"))
    set_param_sharding(param, ParamSharding(family, shape=(8, 4), box=Box((2, 0), (2, 4))))
    assert param_sharding(param).family is family
    assert param_sharding(param).box == Box((2, 0), (2, 4))


@pytest.mark.parametrize("bad", [{"divisor": 0}, {"divisor": 1, "copies": 0}])
def test_a_family_that_cannot_be_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="divisor"):
        ReductionGroup("expert", self_group(), **bad)


def test_shards_are_among_the_ranks_of_the_group() -> None:
    with pytest.raises(PlanError, match="cut over"):
        ReductionGroup("expert", self_group(rank=0), divisor=1, shards=self_group(rank=1))


def test_a_box_needs_a_shape() -> None:
    with pytest.raises(PlanError, match="neither"):
        ParamSharding(box=Box((0,), (1,)))


def test_a_parameter_without_a_word_is_a_whole_logical_tensor() -> None:
    found = logical_of("a", torch.zeros(2, 4))
    assert (found.name, found.shape, found.box, found.whole) == ("a", (2, 4), Box((0, 0), (2, 4)), True)
    assert logical_of("a", torch.zeros(0), (2, 4)) == found  # its values are elsewhere


def test_a_part_of_a_logical_tensor_is_named_as_the_tensor() -> None:
    param = Parameter(torch.zeros(2, 4))
    set_param_sharding(param, ParamSharding(name="whole", shape=(8, 4), box=Box((2, 0), (2, 4))))
    found = logical_of("part", param)
    assert (found.name, found.shape, found.whole) == ("whole", (8, 4), False)
    shard = found.shard("optim", "float32", Interval(1, 3), "/exp_avg")
    assert (shard.name, shard.shape, shard.box) == ("optim/whole/exp_avg", (8, 4), Box((2, 0), (2, 4)))


@pytest.mark.parametrize("box", [Box((2, 0), (3, 4)), Box((7, 0), (2, 4)), Box((0,), (2,))])
def test_a_box_that_the_parameter_is_not_is_refused(box: Box) -> None:
    param = Parameter(torch.zeros(2, 4))
    set_param_sharding(param, ParamSharding(shape=(8, 4), box=box))
    with pytest.raises(PlanError, match="was assigned") as caught:
        logical_of("part", param)
    assert caught.value.code == "zero-reduction-group"
