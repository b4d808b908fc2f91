"""Which optimizers may be given shards, found out by asking them."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

import ds_zero
from ds_comm.placement import Box
from ds_comm.reduction_group import Logical
from ds_config.errors import UnsupportedError
from ds_ops import optim
from ds_zero.layout.shard_options import OptimizerTraits
from ds_zero.update import probe, wrapped_optimizer
from ds_zero.update.wrapped_optimizer import tell_parts, traits_of

sys.path.append(str(Path(__file__).parent / "world"))
import foreign

RATES = pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-6, 5e-7, 1e-7, 1e-9, 0.0])


def params():
    return list(nn.Linear(6, 5).parameters())


def larger():
    return list(nn.Linear(200, 150).parameters())


def layout(kind, params, **settings):
    return traits_of(kind(params, **settings), None)[0].layout


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adadelta"]
)
def test_elementwise(name):
    assert traits_of(getattr(torch.optim, name)(params(), lr=1e-2), None)[0].layout == "flat"


def test_fused_and_warming_up():
    assert traits_of(torch.optim.AdamW(params(), lr=0.0, fused=True), None)[0].layout == "flat"
    assert traits_of(torch.optim.AdamW(params(), lr=torch.tensor(1e-3)), "dim0")[0].layout == "dim0"


TORCHS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"foreach": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.AdamW, {}),
    (optim.Lion, {}),
    (optim.Adagrad, {}),
    *((kind, {}) for kind in foreign.ELEMENTWISE),
]


@RATES
@pytest.mark.parametrize(("kind", "settings"), TORCHS)
def test_elementwise_at_any_rate_and_size(kind, settings, lr):
    assert layout(kind, larger(), lr=lr, **settings) == "flat"


@RATES
@pytest.mark.parametrize("kind", [*foreign.WHOLE, foreign.Factored128, foreign.Blockwise, optim.Lamb])
def test_what_needs_whole_tensors_is_seen_by_its_movement(kind, lr):
    if lr == 0.0 and kind is foreign.Larc:
        pytest.skip("divides by its rate")
    assert layout(kind, larger(), lr=lr) == "whole"


@pytest.mark.parametrize("shape", [(512, 300), (40, 200, 3, 3), (2, 400, 400), (256, 256, 3, 3)])
@pytest.mark.parametrize("kind", [foreign.Factored, foreign.Factored128])
def test_what_acts_otherwise_from_a_size_on_is_asked_at_the_sizes_of_its_parameters(kind, shape):
    factored = min(shape[-2:]) >= kind.least
    assert layout(kind, [nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(7))]) == (
        "whole" if factored else "flat"
    )


@RATES
def test_one_norm_for_all_is_seen_at_any_rate(lr):
    found = traits_of(foreign.Normed(larger(), lr=lr), None)[0]
    assert (found.layout, found.coupled) == ("whole", True)


def test_random_numbers_are_refused():
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        layout(foreign.Noisy, params())


def test_what_is_not_seen_to_move_is_whole():
    assert layout(foreign.Still, params()) == "whole"


def test_what_refuses_fp64_and_rate_1_is_asked_at_its_own_rate():
    assert layout(foreign.Timid, larger(), lr=1e-3) == "flat"
    assert layout(foreign.Timid, larger(), lr=1e-9) == "whole"  # in fp32 nothing is seen to move


def test_a_layout_that_was_asked_for_stands_where_nobody_can_ask_the_optimizer():
    class Refuses(foreign.Foreign):
        def update(self, p, grad, state, lr):
            raise ValueError("only on my device")

    with pytest.raises(UnsupportedError, match="only on my device") as caught:
        traits_of(Refuses(params()), None)
    assert 'layout="whole"' in caught.value.fix
    assert traits_of(Refuses(params()), "flat")[0].layout == "flat"


def test_the_device_of_the_parameters_is_asked_first():
    class There:
        device = torch.device("cuda", 1)

    cpu = torch.device("cpu")
    assert probe.devices_of([There(), There()]) == [There.device, cpu]
    assert probe.devices_of([nn.Parameter(torch.ones(1, device="meta"))]) == [cpu]
    assert probe.devices_of([]) == [cpu]


def test_few_tensors_of_bounded_size_are_stepped():
    shapes = probe.shapes_of(
        [torch.empty(s, device="meta") for s in [(50_000, 4096), (4096, 4096), (10**9,), (), (512, 512, 3, 3)]]
    )
    assert shapes.small == ((48,), (8, 6), (8, 6, 3, 2))
    assert [len(shape) for shape in shapes.large] == [1, 2, 4]
    assert all(100_000 < math.prod(shape) <= 150_000 for shape in shapes.large)
    assert all(min(shape[:2]) >= 128 for shape in shapes.large[1:])
    assert probe.shapes_of([]).small == ((8, 6),)
    assert probe.shapes_of([torch.empty(3, 1)]).small == ((8, 6),)
    assert probe.shapes_of([torch.empty(3, 5)]) == probe.Shapes(((3, 5),), ())


def test_groups_that_differ_in_their_rates_only_are_asked_once():
    with mock.patch.object(wrapped_optimizer, "ask", wraps=probe.ask) as asked:
        groups = [{"params": params(), "lr": 1e-3 + i * 1e-4} for i in range(5)]
        groups += [{"params": params(), "lr": 1e-6}, {"params": params(), "weight_decay": 0.1}]
        found = traits_of(torch.optim.AdamW(groups, lr=1e-3), None)
    assert [one.layout for one in found.values()] == ["flat"] * 7
    assert asked.call_count == 3


def test_whole_parameters_by_group():
    matrix, bias = params()
    assert traits_of(torch.optim.Muon([matrix], lr=1e-2), None)[0].layout == "whole"
    assert traits_of(torch.optim.Adafactor([matrix, bias], lr=1e-2), None)[0].layout == "whole"
    assert traits_of(optim.Lamb([matrix, bias], lr=1e-2), None)[0].layout == "whole"


@pytest.mark.parametrize("asked", ["flat", "dim0"])
def test_a_layout_that_would_be_wrong_is_refused(asked):
    with pytest.raises(UnsupportedError, match="Adafactor needs whole parameters"):
        traits_of(torch.optim.Adafactor(params(), lr=1e-2), asked)


def test_what_needs_the_loss_again_is_refused_with_the_reason():
    net = nn.Linear(6, 5)
    with pytest.raises(UnsupportedError, match="closure"):
        ds_zero.shard(net, torch.optim.LBFGS(net.parameters(), lr=0.1), stage=2)


def test_what_an_optimizer_wraps_is_left_alone_too():
    calls = []
    weights = params()
    for p in weights:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in weights]
    optimizer = foreign.Slow(weights, 1e-2)
    optimizer.inner.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch.optim.lr_scheduler.LambdaLR(optimizer.inner, lambda _: 1.0)
    optimizer.inner.generator = torch.Generator().manual_seed(3)
    state = optimizer.inner.generator.get_state()
    assert traits_of(optimizer, None)[0].layout == "flat"
    assert optimizer.counts == [0]
    assert not optimizer.state
    assert not optimizer.inner.state
    assert not calls
    assert torch.equal(state, optimizer.inner.generator.get_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    assert all(p.grad.eq(1).all() for p in weights)


def test_asking_leaves_python_and_numpy_alone():
    class Draws(foreign.Adamish):
        def update(self, p, grad, state, lr):
            random.random()
            numpy.random.random()
            return super().update(p, grad, state, lr)

    before = random.getstate(), numpy.random.get_state()[2]
    traits_of(Draws(params()), None)
    assert before == (random.getstate(), numpy.random.get_state()[2])


def test_asking_leaves_optimizer_and_randomness_alone():
    optimizer = torch.optim.AdamW(params(), lr=1e-2)
    before = torch.random.get_rng_state()
    groups = [dict(g) for g in optimizer.param_groups]
    traits_of(optimizer, None)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not optimizer.state
    assert all(a["params"] is b["params"] for a, b in zip(groups, optimizer.param_groups, strict=True))


def test_optimizers_of_whole_tensors_are_told_of_parts(caplog):
    """A stack of experts that is cut by their number is whole for Muon, which takes matrices one by one, and has one norm for LAMB."""
    experts = Logical("experts", (4, 6, 5), Box((2, 0, 0), (2, 6, 5)))
    cut = Logical("cut", (6, 5), Box((0, 0), (3, 5)))
    whole = Logical("whole", (6, 5), Box((0, 0), (6, 5)))
    groups = {0: OptimizerTraits("whole"), 1: OptimizerTraits("flat")}
    told = []
    for kind in (optim.Muon, optim.Lamb):
        caplog.clear()
        tell_parts(kind(params()), groups, [(0, experts), (0, cut), (0, whole), (1, cut)])
        told.append([record.args[1:] for record in caplog.records])
    assert told == [[(1, "cut")], [(2, "experts, cut")]]
