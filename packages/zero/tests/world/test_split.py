"""Updates split by importance, beside a loop over whole parameters that follows the same rules."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import ds_comm
import ds_ops.optim
import ds_zero
from ds_comm.placement import Box
from ds_comm.reduction_group import ParamSharding, set_param_sharding
from ds_config.errors import PlanError
from ds_testing import world
from ds_zero import OffloadPolicy
from ds_zero.policies.zenflow import Calendar, Votes, ZenFlowOptions, top_columns

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1


def adamw(value, grad, mean, square, count):
    """One step of AdamW on elements; new (value, mean, square)."""
    mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    square = BETAS[1] * square + (1 - BETAS[1]) * grad * grad
    hat, root = mean / (1 - BETAS[0] ** count), (square / (1 - BETAS[1] ** count)).sqrt() + EPS
    return value * (1 - LR * DECAY) - LR * hat / root, mean, square


class Loop:
    """The rules, parameter by parameter."""

    def __init__(self, net, told):
        self.values = {name: p.detach().clone().double() for name, p in net.named_parameters()}
        self.state = {name: [torch.zeros_like(v) for _ in range(3)] for name, v in self.values.items()}
        self.told, self.calendar, self.columns, self.votes, self.whole = told, Calendar(told), {}, {}, 0

    def step(self, grads):
        told, calendar = self.told, self.calendar
        auto, counted = told.interval == 0, calendar.step >= told.warm_up
        matrices = {name: g.abs().sum(0) for name, g in grads.items() if g.dim() == 2}
        if counted and calendar.chooses():
            self.columns = {name: top_columns(sums.float(), told.ratio) for name, sums in matrices.items()}
        voted = False
        if counted and auto:
            votes = [
                self.votes.setdefault(name, Votes()).add(
                    float(sums[self.columns[name]].sum()), float(sums.sum()), calendar.since + 1, told.ratio
                )
                for name, sums in matrices.items()
            ]
            voted = sum(votes) >= int(told.auto_ratio * len(votes))
        turn = calendar.next(voted=voted)
        self.whole += turn.whole or turn.end
        for name, grad in grads.items():
            value, (mean, square, rest) = self.values[name], self.state[name]
            fast = torch.ones_like(value, dtype=torch.bool)
            if grad.dim() == 2 and not turn.whole:
                fast = torch.zeros_like(fast)
                fast[:, self.columns[name]] = True
                if turn.choose:
                    mean[fast], square[fast] = 0, 0
            count = calendar.fast if grad.dim() == 2 and not turn.whole else calendar.step
            rest += grad
            new = adamw(value, grad, mean, square, count)
            if turn.end and not bool(fast.all()):
                slow = adamw(value, rest / calendar.since, mean, square, self.whole)
                new = [torch.where(fast, a, b) for a, b in zip(new, slow, strict=True)]
                fast = torch.ones_like(fast)
            for old, now in zip((value, mean, square), new, strict=True):
                old[fast] = now[fast]
            rest[fast] = 0
        if turn.end:
            self.votes.clear()
            calendar.ended()


def averaged(bench, net, step):
    """Gradients of the mean loss over the ranks, of a whole model."""
    net.zero_grad()
    for rank in range(dist.get_world_size()):
        bench.loss(net, bench.batch(step, 0, rank)).backward()
    return {name: p.grad.double() / dist.get_world_size() for name, p in net.named_parameters()}


def sharded(bench, told, **options):
    net = bench.model("plain")
    optimizer = ds_ops.optim.AdamW(net.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    policy = ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40)
    return net, ds_zero.shard(net, optimizer, updates=told, policy=policy, **options)


def train(bench, net, optimizer, steps):
    for step in steps:
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


RULES = {
    "intervals": ZenFlowOptions(0.2, 6, 3),
    "warm-up": ZenFlowOptions(0.1, 0, 2, warm_up=3),
    "auto": ZenFlowOptions(0.3, 5, 0, auto_ratio=0.5),
    "every step": ZenFlowOptions(0.25, 1, 1),
    "all columns": ZenFlowOptions(1.0, 4, 2),
}


CASES = [
    # Every rule at one stage and every stage by one rule; the rest of the product is slow.
    pytest.param(rules, stage, marks=() if stage == 1 or rules == "intervals" else pytest.mark.slow)
    for rules in RULES
    for stage in range(4)
]


@pytest.mark.parametrize(("rules", "stage"), CASES)
@world(2)
def test_a_run_is_the_loop(bench, rules, stage):
    told = RULES[rules]
    net, optimizer = sharded(bench, told, stage=stage)
    whole = bench.model("plain")
    loop = Loop(whole, told)
    for step in range(10):
        train(bench, net, optimizer, [step])
        loop.step(averaged(bench, whole, step))
        with torch.no_grad():
            for name, p in whole.named_parameters():
                p.copy_(loop.values[name])
    for name, p in net.named_parameters():
        found = ds_zero.safe_get_full_fp32_param(p).double()
        torch.testing.assert_close(
            found, loop.values[name], rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "file"])
@world(2)
def test_state_may_rest_elsewhere(bench, tmp_path, placement):
    told = RULES["intervals"]
    tier = OffloadPolicy("host") if placement == "host" else OffloadPolicy("file", str(tmp_path), buffer_count=2)
    runs = []
    for options in ({}, {"offload_optimizer": tier}):
        net, optimizer = sharded(bench, told, stage=2, **options)
        train(bench, net, optimizer, range(7))
        runs.append({name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()})
        optimizer.close()
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=0, atol=0)


@world(2)
def test_it_goes_on_from_what_is_kept(bench):
    """In the middle of an interval: the sums of the rest are kept, too."""
    told = RULES["intervals"]
    first, one = sharded(bench, told, stage=1)
    train(bench, first, one, range(5))
    second, two = sharded(bench, told, stage=1)
    kept, scalars = {s.shard.name: s.data.clone() for s in one.shards()}, one.common_state_dict()
    two.materialize({s.shard.name: s.shard.shape for s in one.shards()})
    with torch.no_grad():
        for (a, p), (b, q) in zip(first.named_parameters(), second.named_parameters(), strict=True):
            assert a == b
            ds_zero.safe_set_full_fp32_param(q, ds_zero.safe_get_full_fp32_param(p))
    for shard in two.shards():
        shard.data.copy_(kept[shard.shard.name])
    two.load_state_dict(scalars)
    two.refresh()
    for net, optimizer in ((first, one), (second, two)):
        train(bench, net, optimizer, range(5, 9))
    for (_, p), (_, q) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(
            ds_zero.safe_get_full_fp32_param(q), ds_zero.safe_get_full_fp32_param(p), rtol=0, atol=0
        )
    for optimizer in (one, two):
        optimizer.close()


@world(1)
def test_other_optimizers_are_refused(bench):
    net = bench.model("plain")
    with pytest.raises(PlanError, match="split by importance"):
        ds_zero.shard(net, torch.optim.AdamW(net.parameters()), updates=ZenFlowOptions())


class Sometimes(torch.nn.Module):
    """`spare` is used where it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.always, self.spare = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, spare):
        x = self.always(x)
        return (self.spare(x) if spare else x).square().mean()


@world(2)
def test_gradients_wait_for_the_end_of_an_interval_in_which_nobody_uses_their_parameters():
    told = ZenFlowOptions(0.25, 0, 3)
    net = Sometimes()
    inner = ds_ops.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    optimizer = ds_zero.shard(net, inner, stage=2, updates=told)
    torch.manual_seed(7)
    x = torch.randn(4, 8)
    found = []
    for used in (True, True, False, False, False, False):
        net(x, used).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(ds_zero.safe_get_full_fp32_param(net.spare.weight).clone())
    moved = [(b != a).any(0) for a, b in itertools.pairwise(found)]
    chosen = moved[0]
    assert chosen.sum() == 2  # of 8 columns
    assert torch.equal(moved[1], ~chosen)  # the rest, by what had added up; what is chosen stays without a gradient
    assert not any(m.any() for m in moved[2:])  # nothing waits any more
    optimizer.close()


@world(2)
def test_ranks_with_other_matrices_keep_and_vote_together():
    """As stages of a pipeline are: each rank has a part of the model of its own."""
    rank = dist.get_rank()
    told = ZenFlowOptions(0.25, 0, 0, auto_ratio=1.0)

    def made():
        net = torch.nn.ModuleDict({f"part{rank}": torch.nn.Linear(8, 8, bias=False)})
        inner = ds_ops.optim.AdamW(net.parameters(), lr=LR)
        group, everyone = ds_comm.self_group("data", rank), ds_comm.world_group()
        return net, ds_zero.shard(net, inner, group=group, norm=everyone, stage=1, updates=told)

    def step(net, optimizer, large):
        # Of the first rank the rest outgrows the chosen columns at once, of the second never.
        grad = torch.full((8, 8), 1.0 if large else 1e-6)
        grad[:, 3] = 1.0
        grad[:, 5] = 2.0
        next(net.parameters()).grad = grad
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = made()
    for _ in range(3):
        step(net, optimizer, large=rank == 0)
    state = optimizer.state_dict()["importance"]
    assert state["since"] == 3  # one of two votes is not all of them
    assert set(state["columns"]) == {"part0.weight", "part1.weight"}
    told_all = [None, None]
    dist.all_gather_object(told_all, state)
    assert told_all[0] == told_all[1]
    for _ in range(60):
        step(net, optimizer, large=True)
        if optimizer.state_dict()["importance"]["since"] == 0:
            break
    else:
        raise AssertionError("no interval ended")
    other, second = made()
    second.load_state_dict({**optimizer.common_state_dict(), "tensors": []})  # the tensors of the state begin anew
    step(other, second, large=True)
    optimizer.close()
    second.close()


@world(1)
def test_columns_of_matrices_that_are_cut_are_refused():
    net = Sometimes()
    set_param_sharding(net.always.weight, ParamSharding(None, None, (16, 8), Box((8, 0), (8, 8))))
    with pytest.raises(PlanError, match=r"always\.weight, which tensor parallelism has cut"):
        ds_zero.shard(net, ds_ops.optim.AdamW(net.parameters()), stage=1, updates=ZenFlowOptions())
