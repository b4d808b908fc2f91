"""Whole parameters, gradients and state of a sharded model."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_config.errors import PlanError, ShardedAccessError
from ds_testing import world
from ds_zero.runtime.sharded_model import sharding_of
from ds_zero.runtime.unit import Full

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)


REPLACE = {
    "data=": lambda p: setattr(p, "data", torch.full_like(p.data, 0.5)),
    "data.fill_": lambda p: p.data.fill_(0.5),
    "fill_": lambda p: p.detach().fill_(0.5),
}


@pytest.mark.parametrize("edit", REPLACE)
@pytest.mark.parametrize("access", [{"modifier_rank": 0}, {"write": True}], ids=str)
@pytest.mark.parametrize("memory", ["private", "shared"])
@STAGES
@world(2)
def test_each_way_to_write_is_kept_and_masters_beside_it_keep_their_digits(stage, memory, access, edit):
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    fine = net.bias.detach().clone()
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, memory=memory, precision="bf16"
    )
    with ds_zero.GatheredParameters(net, **access):
        if "write" in access or dist.get_rank() == 0:
            REPLACE[edit](net.weight)
    for param, expected in ((net.weight, torch.full((8, 8), 0.5)), (net.bias, fine)):
        torch.testing.assert_close(ds_zero.safe_get_full_fp32_param(param), expected, rtol=0, atol=0)
        with ds_zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), expected.bfloat16(), rtol=0, atol=0)
    optimizer.close()


@world(2)
def test_data_that_is_replaced_in_a_model_inside_init_is_every_ranks():
    with ds_zero.Init():
        net = nn.Linear(8, 8)
    with ds_zero.GatheredParameters(net.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            net.weight.data = torch.full((8, 8), 0.5)
    with ds_zero.GatheredParameters(net.weight):
        assert net.weight.eq(0.5).all()


def make(bench, stage, **options):
    net = bench.model("plain")
    return net, ds_zero.shard(net, bench.adamw(net), stage=stage, policy=SMALL, **options)


@STAGES
@world(2)
def test_a_parameter_keeps_its_face(bench, stage):
    plain = bench.model("plain")
    net, optimizer = make(bench, stage)
    for step in range(2):
        for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert (a.shape, a.dtype, a.device, a.numel(), a.ndim, a.requires_grad, a.is_leaf) == (
                b.shape, b.dtype, b.device, b.numel(), b.ndim, True, True), name  # fmt: skip
            assert isinstance(a, nn.Parameter)
            assert len(a) == len(b)
            assert a.stride() == b.stride()
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


MISUSE = {
    "add": lambda p: p + 1, "index": lambda p: p[0], "write": lambda p: p.add_(1), "item": lambda p: p.sum().item(),
    "list": lambda p: p.tolist(), "cat": lambda p: torch.cat([p, p]), "numpy": lambda p: p.detach().numpy(),
    "init": nn.init.zeros_, "equal": lambda p: p == 0, "bool": lambda p: bool((p == 0).all()), "iterate": lambda p: list(p),
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[-1]), p), "average": lambda p: p.clone().lerp_(p.data, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("use", MISUSE)
@world(2)
def test_every_other_use_is_refused_by_name(bench, use):
    net, optimizer = make(bench, 3)
    with pytest.raises(ShardedAccessError, match=r"blocks\.0\.up\.weight"), torch.no_grad():
        MISUSE[use](net.blocks[0].up.weight)
    assert "released" in repr(net.blocks[0].up.weight)
    optimizer.close()


@STAGES
@world(2)
def test_looking_at_a_sharded_model_is_never_refused(bench, stage):
    """On one rank alone, too: nothing is sent."""
    plain = bench.model("plain").state_dict()
    net, optimizer = make(bench, stage)
    told = []
    handler = logging.Handler()
    handler.emit = told.append
    logging.getLogger("ds_zero").addHandler(handler)
    if dist.get_rank() == 0:
        state = net.state_dict()
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        shadow = {name: param.detach().clone().cpu() for name, param in net.named_parameters()}
        assert list(state) == list(loaded) == list(plain)
        cut = {name for name, param in net.named_parameters() if type(param) is ds_zero.ShardedParameter}
        assert bool(cut) == (stage == 3)
        for name, value in loaded.items():
            assert value.shape == (0,) if name in cut else torch.equal(value, plain[name])
            assert shadow[name].shape == value.shape
        assert sum("show an empty tensor" in line.getMessage() for line in told) == (stage == 3)
    logging.getLogger("ds_zero").removeHandler(handler)
    dist.barrier()
    optimizer.close()


@STAGES
@pytest.mark.parametrize("layout", ["flat", "dim0", "whole"])
@world(2)
def test_a_copy_of_a_sharded_model_is_a_model_with_the_same_values(bench, stage, layout):
    """An average of the weights, kept beside a model that trains: its file is one process's, and the model's steps are not disturbed."""
    plain, (net, optimizer) = bench.model("plain"), make(bench, stage, layout=layout)
    average, kept = copy.deepcopy(plain), copy.deepcopy(net)
    assert all(
        hasattr(a, "grad") and a.shape == b.shape for a, b in zip(kept.parameters(), plain.parameters(), strict=True)
    )
    alone = bench.adamw(plain)
    for step in range(3):
        sum(bench.loss(plain, bench.batch(step, 0, rank)) / 2 for rank in range(2)).backward()
        alone.step()
        alone.zero_grad()
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), plain.parameters(), strict=True):
                mine.lerp_(other, 0.25)
            with ds_zero.GatheredParameters([*net.parameters(), *kept.parameters()], modifier_rank=0):
                for mine, other in zip(kept.parameters(), net.parameters(), strict=True):
                    mine.lerp_(other, 0.25)
    with torch.no_grad():
        batch = bench.batch(0, 0, 0)
        torch.testing.assert_close(bench.loss(kept, batch), bench.loss(average, batch))
    with ds_zero.GatheredParameters(kept):
        again = copy.deepcopy(kept)
        torch.save(kept.state_dict(), file := io.BytesIO())
    file.seek(0)
    for state in (torch.load(file, weights_only=True), again.state_dict()):
        for name, value in average.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    optimizer.close()


class Tied(nn.Module):
    """A head that shares the embedding's weight, and a layer that reads its weight by `detach`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(7, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.block[0].register_forward_hook(lambda module, args, out: out * module.weight.detach().norm())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


@pytest.mark.parametrize("numel", [0, 60, 10_000], ids=["a unit a layer", "a unit a block", "one unit"])
@world(2)
def test_a_module_may_be_called_alone_whose_weights_are_in_a_unit_around_it(bench, numel):
    """As an encoder is, with the embedding that it shares: whichever module the unit belongs to, and without the model's forward."""
    ids, plain, net = torch.arange(7), Tied(), Tied()
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    policy = ds_zero.UnitSizePolicy(max_numel=numel, persist_numel=0)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, policy=policy)
    for _ in range(3):
        with torch.no_grad():
            for name, inp in (
                ("embed", ids),
                ("block.0", torch.ones(2, 6)),
                ("block.2", torch.ones(2, 6)),
                ("head", torch.ones(2, 6)),
            ):
                torch.testing.assert_close(net.get_submodule(name)(inp), plain.get_submodule(name)(inp))
            torch.testing.assert_close(net(ids), plain(ids))
        assert not any(unit.state is Full.CURRENT for unit in net_units(net))
        for model, one in ((net, optimizer), (plain, alone)):
            out = model.block(model.embed(ids))
            (model.head(out).square().mean() + model(ids).mean()).backward()
            one.step()
            one.zero_grad()
    with ds_zero.GatheredParameters(net):
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    with pytest.raises(ShardedAccessError):
        net.embed.weight + 1
    optimizer.close()


def net_units(net):
    return sharding_of(next(net.parameters())).units


@STAGES
@world(2)
def test_a_pickled_model_is_a_plain_one(bench, stage):
    """The whole module, as `torch.save(model)` writes it: hooks stay behind, and a file of empty weights is refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, policy=SMALL)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage == 3:
        with pytest.raises(ShardedAccessError, match=r"module .* was pickled while"):
            torch.save(net, io.BytesIO())
    with ds_zero.GatheredParameters(net):
        torch.save(net, file := io.BytesIO())
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert torch.equal(plain(torch.ones(2, 4)), net(torch.ones(2, 4)))
    plain(torch.ones(2, 4)).sum().backward()
    assert all(type(p) is nn.Parameter and p.grad is not None for p in plain.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.close()


@STAGES
@world(2)
def test_gathered_parameters_are_whole_inside(bench, stage):
    plain = bench.model("plain")
    net, optimizer = make(bench, stage)
    with ds_zero.GatheredParameters(net):
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
        with ds_zero.GatheredParameters(net.head.weight):
            assert torch.equal(net.head.weight, plain.head.weight)
        assert torch.equal(net.head.weight, plain.head.weight)
        state = net.state_dict()
    assert all(torch.equal(state[k], v) for k, v in plain.state_dict().items())  # outlives the gather
    optimizer.close()


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@world(2)
def test_a_change_by_one_rank_becomes_everyones_and_survives_the_step(bench, stage, precision):
    net = bench.model("plain")
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.0), stage=stage, policy=SMALL, precision=precision
    )
    with ds_zero.GatheredParameters(net.head.weight, modifier_rank=1), torch.no_grad():
        net.head.weight.fill_(float(dist.get_rank() + 3))
    with ds_zero.GatheredParameters([net.embed.weight], write=True), torch.no_grad():
        net.embed.weight.fill_(0.5)
    net(bench.batch(0, 0, 0)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(
        ds_zero.safe_get_full_fp32_param(net.head.weight),
        torch.full_like(net.head.weight, 4.0, dtype=torch.float32)
        if stage < 3
        else torch.full(net.head.weight.shape, 4.0),
    )
    with ds_zero.GatheredParameters(net):
        assert (net.head.weight == 4).all()
        assert (net.embed.weight == 0.5).all()
    optimizer.close()


@world(2)
def test_a_change_without_write_access_is_dropped_and_told(bench):
    net, optimizer = make(bench, 3)
    with (
        pytest.raises(ShardedAccessError, match=r"modification of head\.weight"),
        ds_zero.GatheredParameters(net.head.weight),
        torch.no_grad(),
    ):
        net.head.weight.zero_()
    with ds_zero.GatheredParameters(net.head.weight):
        assert torch.equal(net.head.weight, bench.model("plain").head.weight)
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@world(2)
def test_kept_parameters_can_be_edited_like_any(bench, stage, precision):
    """`load_state_dict` into a sharded model, also with a master copy apart: it survives the step."""
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.0), stage=stage, precision=precision)
    new = {k: torch.full_like(v, 0.25) for k, v in net.state_dict().items()}
    net.load_state_dict(new)
    net(bench.batch(0, 0, 0)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all((p == 0.25).all() for p in net.parameters())
    optimizer.close()


@STAGES
@world(2)
def test_gradients_are_those_of_one_process(bench, stage):
    net, optimizer = make(bench, stage, clip=float("inf"))
    twin = bench.model("plain")
    for micro in range(2):
        bench.loss(net, bench.batch(0, micro, dist.get_rank())).backward()
        for rank in range(2):
            (bench.loss(twin, bench.batch(0, micro, rank)) / 2).backward()
    for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ds_zero.safe_get_full_grad(a), b.grad, msg=name, rtol=1e-4, atol=1e-7)
    local = sum(float(ds_zero.safe_get_local_grad(p).square().sum()) for p in net.parameters())
    total = torch.tensor(local)
    if stage:
        dist.all_reduce(total)
    norm = torch.stack([p.grad.norm() for p in twin.parameters()]).norm()
    assert total.sqrt().item() == pytest.approx(norm.item(), rel=1e-4)
    ds_zero.safe_update_full_grad_vectorized(list(net.parameters()), lambda grad, param: grad * 2)
    ds_zero.safe_set_full_grad(net.head.weight, torch.zeros(net.head.weight.shape))
    optimizer.step()
    optimizer.zero_grad()
    left = torch.stack([p.grad.norm() * 2 for n, p in twin.named_parameters() if n != "head.weight"]).norm()
    assert optimizer.last.norm == pytest.approx(left.item(), rel=1e-4)
    assert ds_zero.safe_get_full_grad(net.head.weight) is None
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1])
@world(2)
def test_gradients_that_were_not_reduced_are_this_ranks_own(bench, stage):
    net, optimizer = make(bench, stage)
    twin = bench.model("plain")
    with optimizer.no_sync():
        for micro in range(2):
            bench.loss(net, bench.batch(0, micro, dist.get_rank())).backward()
            bench.loss(twin, bench.batch(0, micro, dist.get_rank())).backward()
            for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ds_zero.safe_get_full_grad(a), b.grad, msg=name, rtol=1e-4, atol=1e-7)
    optimizer.close()


@STAGES
@world(2)
def test_optimizer_state_whole_and_local(bench, stage):
    net, optimizer = make(bench, stage)
    weight = net.blocks[1].up.weight
    assert ds_zero.safe_get_full_optimizer_state(weight, "exp_avg") is None
    bench.loss(net, bench.batch(0, 0, dist.get_rank())).backward()
    grad = ds_zero.safe_get_full_grad(weight)
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(ds_zero.safe_get_full_optimizer_state(weight, "exp_avg"), grad * 0.1)
    ds_zero.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 7.0), "exp_avg")
    assert (ds_zero.safe_get_local_optimizer_state(weight, "exp_avg") == 7).all()
    ds_zero.safe_set_local_optimizer_state(
        weight, ds_zero.safe_get_local_optimizer_state(weight, "exp_avg") + 1, "exp_avg"
    )
    assert (ds_zero.safe_get_full_optimizer_state(weight, "exp_avg") == 8).all()
    ds_zero.safe_set_local_fp32_param(weight, ds_zero.safe_get_local_fp32_param(weight) * 0 + 3)
    assert (ds_zero.safe_get_full_fp32_param(weight) == 3).all()
    ds_zero.safe_set_full_fp32_param(weight, torch.full(weight.shape, 5.0))
    with ds_zero.GatheredParameters(weight):
        assert (weight == 5).all()
    optimizer.close()


@world(2)
def test_errors_say_what_is_missing(bench):
    net, optimizer = make(bench, 2)
    with pytest.raises(PlanError, match=r"head\.weight has nothing"):
        ds_zero.safe_set_full_grad(net.head.weight, torch.zeros(net.head.weight.shape))
    with pytest.raises(PlanError, match="shape"):
        ds_zero.safe_set_full_fp32_param(net.head.weight, torch.zeros(3))
    other = nn.Parameter(torch.zeros(2))
    assert ds_zero.safe_get_full_fp32_param(other) is None
    with pytest.raises(PlanError, match="not part of a sharded model"):
        ds_zero.safe_set_local_fp32_param(other, other)
    optimizer.close()


@STAGES
@world(2)
def test_generation_runs_without_our_hooks(bench, stage):
    net, optimizer = make(bench, stage)
    plain, tokens = bench.model("plain"), bench.batch(0, 0, dist.get_rank())

    def count():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())

    hooks = count()
    with ds_zero.unwrap_model_for_generation(net) as bare, torch.no_grad():
        assert count() == 0
        for _ in range(1 + dist.get_rank()):  # ranks may generate for different lengths
            assert torch.equal(bare(tokens), plain(tokens))
    assert count() == hooks
    bench.loss(net, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


@world(2)
def test_what_is_gathered_after_an_alias_was_left_behind_is_right(bench):
    """An alias taken inside keeps its memory; the unit goes on with other memory, and every gather after it is whole."""
    net = bench.model("plain").to(torch.bfloat16)
    expected = {name: param.detach().clone() for name, param in net.named_parameters()}
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=3, policy=SMALL, precision="bf16")
    for _ in range(2):
        taken = {}
        for name, param in net.named_parameters():
            with ds_zero.GatheredParameters(param):
                taken[name] = param.detach()
        for name, value in expected.items():
            assert torch.equal(taken[name], value), name
    optimizer.close()
