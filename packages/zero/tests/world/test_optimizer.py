"""The wrapped optimizer: groups, formats, loss scale, and what a checkpoint takes from it."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ops.optim
import ds_zero
from ds_config.errors import CheckpointError, PlanError, UnsupportedError
from ds_testing import world

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SMALL = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}, "AdamW": {}, "NAdam": {}, "RAdam": {},
    "Adamax": {}, "Adagrad": {}, "Adadelta": {}, "RMSprop": {"centered": True, "momentum": 0.5}, "Rprop": {}, "ASGD": {},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@world(2)
def test_every_elementwise_optimizer_of_torch(bench, name):
    cls, keys = getattr(torch.optim, name), OPTIMIZERS[name]
    net, twin = bench.model("plain"), bench.model("plain")
    optimizer = ds_zero.shard(net, cls(net.parameters(), lr=0.01, foreach=False, **keys), stage=2, policy=SMALL)
    plain = cls(twin.parameters(), lr=0.01, foreach=False, **keys)
    for step in range(4):
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        grads = []
        for rank in range(2):
            twin.zero_grad()
            bench.loss(twin, bench.batch(step, 0, rank)).backward()
            grads.append([p.grad for p in twin.parameters()])
        for p, a, b in zip(twin.parameters(), *grads, strict=True):
            p.grad = (a + b) / 2
        plain.step()
    optimizer.close()
    for (n, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), n


@STAGES
@world(2)
def test_ranks_begin_with_what_the_first_one_holds(stage):
    """Whatever differs: one element, the order of rows, what no full row holds, a buffer, nothing."""

    def build():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        return net

    def shift(net, change):
        with torch.no_grad():
            if change == "element":
                net[0].weight[7, 7] += 1
            elif change == "order":
                net[0].weight.copy_(net[0].weight.flip(0))
            elif change == "tail":
                net[1].bias[4] += 1
            elif change == "buffer":
                net[2].running_mean[2] += 1
        return net

    for change in ("element", "order", "tail", "buffer", "nothing"):
        net = shift(build(), change) if dist.get_rank() else build()
        optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage)
        optimizer.close()
        for name, value in build().state_dict().items():
            assert torch.equal(net.state_dict()[name], value), (change, name)


@STAGES
@world(2)
def test_groups_are_the_users_and_edits_between_steps_count(bench, stage):
    def build(net):
        decay = [p for p in net.parameters() if p.dim() > 1]
        other = [p for p in net.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.1, "name": "decay"},
                {"params": other, "weight_decay": 0.0, "lr": 3e-3},
            ],
            lr=1e-2,
        )

    net, twin = bench.model("plain", torch.float64), bench.model("plain", torch.float64)
    inner, plain = build(net), build(twin)
    groups = inner.param_groups
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=SMALL)
    assert optimizer.param_groups is groups
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, plain)]
    for step in range(4):
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (bench.loss(twin, bench.batch(step, 0, rank)) / 2).backward()
        plain.step()
        plain.zero_grad()
        for schedule in schedules:
            schedule.step()
        for o in (optimizer, plain):
            o.param_groups[0]["weight_decay"] = 0.2 * step
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
    assert optimizer.param_groups[0]["name"] == "decay"
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@world(2)
def test_writes_through_data_are_not_lost(bench, stage, memory, precision):
    """`param.data.mul_()` and `param.data = other` leave no trace in torch's versions."""
    net, other = bench.model("plain", torch.float64).float(), bench.model("plain", torch.float64).float()
    optimizers = [
        ds_zero.shard(
            n, torch.optim.SGD(n.parameters(), lr=0.1), stage=stage, policy=SMALL, precision=precision, memory=memory
        )
        for n in (net, other)
    ]
    for step in range(3):
        for n, optimizer in zip((net, other), optimizers, strict=True):
            # In the second: writes that are seen anyway.
            with torch.no_grad():
                weight, bias = n.blocks[0].up.weight, n.blocks[1].up.bias
                if n is net:
                    weight.data.mul_(0.5)
                    weight.data[0].fill_(0.25)
                    bias.data = bias.data + 1.0
                else:
                    weight.mul_(0.5)
                    weight[0].fill_(0.25)
                    bias.add_(1.0)
            optimizer.scale(bench.loss(n, bench.batch(step, 0, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert float(net.blocks[1].up.bias.detach().float().mean()) > 2.5
    net.half()
    bench.loss(other, bench.batch(3, 0, dist.get_rank())).backward()
    with pytest.raises(PlanError, match=r"was replaced by torch\.float16") as caught:
        optimizers[0].step()
    assert caught.value.code == "zero-replaced"
    for optimizer in optimizers:
        optimizer.sharding.runtime.reducing.forget()


@STAGES
@pytest.mark.parametrize("sync", [True, False])
@world(2)
def test_bf16_gradients_of_many_microbatches_add_up(stage, sync):
    """1024 gradients of 1: bf16 alone would stop at 256."""
    net = nn.Linear(32, 1, bias=False)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=1.0), stage=stage, precision="bf16")
    assert net.weight.dtype == torch.bfloat16
    with optimizer.reduction(sync):
        for _ in range(1024):
            net.weight.sum().backward() if stage < 3 else net(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    optimizer.sharding.runtime.reducing.close()
    grad = ds_zero.safe_get_full_grad(net.weight)
    assert grad.dtype == torch.float32
    assert (grad == 1024).all()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


@STAGES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@world(2)
def test_half_precision_tracks_fp32(bench, stage, precision):
    net, twin = bench.model("plain"), bench.model("plain")
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=stage, precision=precision, policy=SMALL, clip=1.0)
    plain = ds_zero.shard(twin, bench.adamw(twin), stage=0, clip=1.0)
    losses = []
    for step in range(30):
        for model, o in ((net, optimizer), (twin, plain)):
            loss = bench.loss(model, bench.batch(step % 3, 0, dist.get_rank()))
            o.scale(loss).backward()
            o.step()
            o.zero_grad()
            losses.append(loss.item())
    assert not optimizer.last.skipped
    assert losses[-2] == pytest.approx(losses[-1], rel=0.05)
    assert optimizer.last.norm == pytest.approx(plain.last.norm, rel=0.3)
    optimizer.close()
    plain.close()


@STAGES
@world(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(bench, stage):
    net = bench.model("plain")
    rule = ds_zero.LossScale(initial=2.0**8, hysteresis=1)
    precision = ds_zero.Precision(scale=rule)
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=stage, precision=precision, policy=SMALL)
    before = bench.model("plain")
    loss = bench.loss(net, bench.batch(0, 0, dist.get_rank()))
    optimizer.scale(loss * (float("inf") if dist.get_rank() else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.last == ds_zero.StepReport(optimizer.last.norm, True, 2.0**8, nonfinite="embed.weight")
    assert not math.isfinite(optimizer.last.norm)
    with ds_zero.GatheredParameters(net):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
    optimizer.scale(bench.loss(net, bench.batch(0, 0, 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.last.skipped, optimizer.last.scale) == (False, 2.0**7)
    optimizer.close()


@world(2)
def test_fp16_without_scaling_the_loss_is_refused(bench):
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=2, precision="fp16")
    torch.autograd.grad(bench.loss(net, bench.batch(0, 0, 0)), net.head.weight)  # is nothing that a step divides
    with pytest.raises(PlanError, match="not scaled"):
        bench.loss(net, bench.batch(0, 0, 0)).backward()
    optimizer.close()


@STAGES
@world(2)
def test_divisor_divides_before_norm_and_clip(bench, stage):
    nets = [bench.model("plain", torch.float64) for _ in range(2)]
    ours = [ds_zero.shard(n, bench.adamw(n), stage=stage, policy=SMALL, clip=0.1) for n in nets]
    bench.loss(nets[0], bench.batch(0, 0, dist.get_rank())).backward()
    (bench.loss(nets[1], bench.batch(0, 0, dist.get_rank())) * 8).backward()
    ours[1].divisor = 8.0
    for optimizer in ours:
        optimizer.step()
        optimizer.zero_grad()
    assert ours[0].last.norm == pytest.approx(ours[1].last.norm, rel=1e-12)
    assert ours[1].divisor == 1.0
    for optimizer in ours:
        optimizer.close()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def dump(optimizer):
    """A checkpoint in memory: every rank's shards put together by name."""
    parts = [None] * dist.get_world_size()
    mine = [(s.shard.name, s.shard.shape, s.shard.interval, s.data.clone()) for s in optimizer.shards()]
    dist.all_gather_object(parts, mine)
    whole, shapes = {}, {}
    for name, shape, interval, data in (entry for part in parts for entry in part):
        flat = whole.setdefault(name, torch.full((math.prod(shape),), float("nan"), dtype=data.dtype))
        flat[interval.start : interval.stop] = data
        shapes[name] = shape
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}


@pytest.mark.parametrize("target", [0, 1, 2, 3])
@pytest.mark.parametrize("source", [0, 3])
@pytest.mark.parametrize("kind", ["unused", "tied"])
@world(2)
def test_what_one_stage_saves_another_resumes(bench, kind, source, target):
    def run(net, optimizer, steps):
        for step in steps:
            bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    first = bench.model(kind, torch.float64)
    one = ds_zero.shard(first, bench.adamw(first), stage=source, policy=SMALL)
    run(first, one, range(3))
    saved, meta = dump(one), json.loads(json.dumps(one.common_state_dict()))
    assert not any(torch.isnan(v).any() for v in saved.values())
    run(first, one, range(3, 5))
    one.close()

    second = bench.model(kind, torch.float64)
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    two = ds_zero.shard(second, bench.adamw(second), stage=target, policy=ds_zero.UnitSizePolicy(max_numel=900))
    two.materialize({name: value.shape for name, value in saved.items()})
    two.load_state_dict(meta)
    for local in two.shards():  # what was never used has no state, saved or made
        flat = saved[local.shard.name].view(-1)
        local.data.copy_(flat[local.shard.interval.start : local.shard.interval.stop])
    two.refresh()
    run(second, two, range(3, 5))
    two.close()
    for (n, a), b in zip(second.named_parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=n)


@world(2)
def test_mistakes_are_told(bench):
    net = bench.model("plain")
    with pytest.raises(PlanError, match="not the model's"):
        ds_zero.shard(net, torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(PlanError, match="stage 4"):
        ds_zero.shard(net, bench.adamw(net), stage=4)
    optimizer = ds_zero.shard(net, bench.adamw(net), stage=1)
    state = optimizer.common_state_dict()
    with pytest.raises(CheckpointError, match="2 optimizer groups"):
        optimizer.load_state_dict({**state, "groups": state["groups"] * 2})
    optimizer.close()


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@world(2)
def test_optimizers_of_whole_parameters(name, stage, memory):
    """Groups of a per-tensor and an elementwise optimizer's layout: matrices are whole on one rank."""

    def train(net, optimizer, ranks):
        for step in range(3):
            for rank in ranks:
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)
                (net(x).square().mean() / (2 if len(ranks) > 1 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3))).double()
        return net, getattr(torch.optim, name)(net.parameters(), lr=1e-2)

    (net, inner), (twin, plain) = make(), make()
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=SMALL, memory=memory)
    train(net, optimizer, [dist.get_rank()])
    train(twin, plain, range(2))
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if name == "Muon" else 1e-12, atol=1e-9)


@STAGES
@world(2)
def test_precision_rules_by_name(stage):
    """A bf16 model whose norms are fp32: formats by glob, and the norm's update is that of fp32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    precision = ds_zero.Precision(
        param=torch.bfloat16, rules=(ds_zero.PrecisionRule("1.*", param=torch.float32, master=torch.float64),)
    )
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, precision=precision, policy=SMALL
    )
    assert [p.dtype for p in net.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    before = net[1].weight.detach().double()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    net(x).float().square().mean().backward()
    grad = ds_zero.safe_get_full_grad(net[1].weight)
    assert grad.dtype == torch.float64
    optimizer.step()
    optimizer.zero_grad()
    master = ds_zero.safe_get_full_fp32_param(net[1].weight)
    assert master.dtype == torch.float64
    torch.testing.assert_close(master, before - 0.1 * grad, rtol=1e-6, atol=1e-7)
    assert ds_zero.safe_get_full_fp32_param(net[0].weight).dtype == torch.float32
    optimizer.close()


@STAGES
@world(2)
def test_the_first_nonfinite_gradient_is_named(stage):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3))
    precision = ds_zero.Precision(skip_nonfinite=True)
    optimizer = ds_zero.shard(
        net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, precision=precision, policy=SMALL
    )
    net[1].weight.register_hook(lambda grad: grad * (float("nan") if dist.get_rank() == 1 else 1.0))
    with ds_zero.NonfiniteDetector(net) as search:
        net(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.last.skipped
    assert optimizer.last.nonfinite == "1.weight"
    found = search.first
    assert (found is None) == (dist.get_rank() == 0)
    if found is not None:
        assert (found.name, found.what, found.phase, found.rank) == ("1.weight", "gradient", "backward", 1)
    with ds_zero.NonfiniteDetector(net) as search:
        net(torch.full((1, 12), float("inf")))
    assert str(search.first) == f"the model: input in forward, rank {dist.get_rank()}"
    optimizer.close()


RATES = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "Muon": {"lr": 1e-2},
    "Adafactor": {},
}


@STAGES
@world(2)
def test_replan_where_a_rank_has_only_padding_of_a_unit(stage):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = ds_zero.shard(net, torch.optim.AdamW(net.parameters()), stage=stage, policy=ds_zero.UnitSizePolicy(1))
    for trains in (True, False):
        net[0].requires_grad_(trains)
        optimizer.replan()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize(
    ("name", "stage", "memory"),
    [*(("AdamW", stage, memory) for stage in range(4) for memory in ("private", "shared")), ("SGD", 1, "private"),
     ("SGD", 3, "private"), ("Muon", 1, "private"), ("Muon", 3, "shared"), ("Adafactor", 0, "private"), ("Adafactor", 3, "private")],
)  # fmt: skip
@world(2)
def test_freezing_and_thawing_keeps_the_state_of_the_others(name, stage, memory):
    def make():
        torch.manual_seed(0)
        bias = name in ("AdamW", "SGD")
        layers = [nn.Linear(12, 12, bias), nn.GELU(), nn.Linear(12, 12, bias), nn.GELU(), nn.Linear(12, 3, bias)]
        net = nn.Sequential(*layers).double()
        net[0].requires_grad_(False)
        return net, getattr(torch.optim, name)(net.parameters(), **RATES[name])

    def change(net):
        net[0].requires_grad_(True)
        net[2].requires_grad_(False)

    (net, inner), (twin, plain) = make(), make()
    optimizer = ds_zero.shard(net, inner, stage=stage, policy=SMALL, memory=memory)
    for step in range(6):
        if step == 3:
            change(net)
            net(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
            with pytest.raises(PlanError, match="replan"):
                optimizer.step()
            optimizer.replan()
            assert not any("2.weight" in s.shard.name for s in optimizer.shards() if s.shard.name.startswith("optim"))
            change(twin)
            for p in twin[2].parameters():
                plain.state.pop(p, None)
        made = [torch.Generator().manual_seed(5 * step + rank) for rank in range(2)]
        xs = [torch.randn(4, 12, generator=g, dtype=torch.float64) for g in made]
        net(xs[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for x in xs:
            (twin(x).square().mean() / 2).backward()
        plain.step()
    optimizer.close()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if name == "Muon" else 1e-12, atol=1e-9 if name == "Muon" else 1e-14)


OPS = {
    "AdamW": {"lr": 0.01}, "Adagrad": {"lr": 0.01}, "SGD": {"lr": 1e-5, "momentum": 0.9}, "Lamb": {"lr": 0.01, "eps": 1.0}, "Muon": {"lr": 0.01},
}  # fmt: skip
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.002}


def narrow(state):
    """The state of Linear 2 in `state`, that of all others as the optimizer has it."""
    return ds_zero.Precision(rules=(ds_zero.PrecisionRule("2.*", state=state),))


def stepped(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        made = torch.Generator().manual_seed(10 * step + dist.get_rank())
        net(torch.randn(8, 12, generator=made)).square().sum().mul(
            30
        ).backward()  # squares of gradients that fp16 can hold
        optimizer.step()
        optimizer.zero_grad()


def three():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("state", TOLERANCE)
@pytest.mark.parametrize("name", OPS)
@world(2)
def test_state_in_a_format_of_its_own_by_name(name, state):
    """Moments are kept in it, and the parameters differ from those of an fp32 state by its roundings only."""
    kind, found = getattr(ds_ops.optim, name), []
    for precision in (narrow(state), None):
        net = three()
        start = [p.detach().clone() for p in net.parameters()]
        optimizer = ds_zero.shard(net, kind(net.parameters(), **OPS[name]), stage=3, policy=SMALL, precision=precision)
        stepped(net, optimizer, 6)
        kept = {s.shard.name: s.data.dtype for s in optimizer.shards() if s.shard.name.startswith("optim/")}
        assert kept
        for shard, dtype in kept.items():
            assert dtype == (state if precision and shard.startswith("optim/2.") else torch.float32), shard
        optimizer.close()
        found.append([p.detach() - s for p, s in zip(net.parameters(), start, strict=True)])
    for a, b in zip(*found, strict=True):
        error = (a - b).norm() / b.norm()
        assert error <= TOLERANCE[state] * (3 if name == "Muon" else 1), (name, error)
    assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True))


@STAGES
@world(2)
def test_state_formats_survive_a_save_and_a_load(stage):
    nets = [three(), three()]
    first, second = (
        ds_zero.shard(n, ds_ops.optim.AdamW(n.parameters(), lr=0.01), stage=stage, policy=SMALL, precision=narrow(torch.bfloat16))
        for n in nets
    )  # fmt: skip
    stepped(nets[0], first, 3)
    saved, scalars = {s.shard.name: s.data.clone() for s in first.shards()}, first.common_state_dict()
    second.materialize({s.shard.name: s.shard.shape for s in first.shards()})
    second.load_state_dict(scalars)
    for local in second.shards():
        assert local.data.dtype == saved[local.shard.name].dtype
        local.data.copy_(saved[local.shard.name])
    second.refresh()
    for net, optimizer in zip(nets, (first, second), strict=True):
        stepped(net, optimizer, 2, first=3)
        optimizer.close()
    for a, b in zip(*(n.parameters() for n in nets), strict=True):
        assert torch.equal(a, b)


@world(2)
def test_optimizers_that_keep_their_state_like_the_master_say_so():
    net = three()
    asked = {"stage": 1, "precision": narrow(torch.bfloat16)}
    with pytest.raises(UnsupportedError, match=r"2\.weight.*AdamW cannot keep its state in bfloat16") as error:
        ds_zero.shard(net, torch.optim.AdamW(net.parameters()), **asked)
    assert error.value.code == "zero-state-dtype"
    with pytest.raises(UnsupportedError, match="float64"):
        ds_zero.shard(net.double(), ds_ops.optim.AdamW(net.parameters()), **asked)
    same = ds_zero.shard(
        net.float(), torch.optim.AdamW(net.parameters()), stage=1, precision=narrow(torch.float32), policy=SMALL
    )
    same.close()


@world(2)
def test_numbers_ride_with_what_ranks_agree_on_for_one_step(bench):
    net = bench.model("plain")
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.01), stage=2, policy=SMALL)
    seen = []
    for step in range(2):
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        if step == 0:
            optimizer.extra = (0.5 + dist.get_rank(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.last.extra)
    optimizer.close()
    assert seen == [(2.0, 4.0), ()]


@STAGES
@world(2)
def test_a_model_that_is_sharded_again_belongs_to_the_newer_optimizer(bench, stage):
    """A notebook's cell that is run twice."""
    policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
    net, twin, zero_grads = bench.model("tied"), bench.model("tied"), set()
    optimizers = []
    for step in range(3):
        optimizers.append(ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, policy=policy))
        zero_grads.add(vars(net)["zero_grad"]._before)
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()
        twin.zero_grad()
        (sum(bench.loss(twin, bench.batch(step, 0, rank)) for rank in range(2)) / 2).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert zero_grads == {None}, "older optimizers are held by the model"
    bench.loss(net, bench.batch(3, 0, 0)).backward()
    for call in (
        optimizers[0].step,
        optimizers[0].shards,
        optimizers[0].state_dict,
        lambda: optimizers[0].load_state_dict({}),
        optimizers[0].no_sync,
    ):
        with pytest.raises(PlanError, match="sharded anew") as caught:
            call()
        assert caught.value.code == "zero-closed"
    optimizers[0].close()
    optimizers[-1].close()
    for (n, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=n)


@STAGES
@pytest.mark.parametrize("frozen", [True, False])
@world(2)
def test_models_share_what_neither_trains(stage, frozen):
    def build():
        torch.manual_seed(0)
        trunk = nn.Linear(6, 8).requires_grad_(not frozen)
        models = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
        return models, [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]

    def rows(step, rank):
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    models, inners = build()
    policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
    optimizers = [ds_zero.shard(m, o, stage=stage, policy=policy) for m, o in zip(models, inners, strict=True)]
    if not frozen or stage == 3:
        with pytest.raises(PlanError, match="shares its parameters") as caught:
            optimizers[0].step()
        assert caught.value.code == "zero-closed"
    else:
        twins, plain = build()
        for step in range(3):
            for model, optimizer, twin, reference in zip(models, optimizers, twins, plain, strict=True):
                model(rows(step, dist.get_rank())).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                (sum(twin(rows(step, rank)).square().mean() for rank in range(2)) / 2).backward()
                reference.step()
                reference.zero_grad()
        for model, twin in zip(models, twins, strict=True):
            torch.testing.assert_close(model.state_dict(), twin.state_dict())
    for optimizer in optimizers:
        optimizer.close()
