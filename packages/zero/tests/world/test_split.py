"""Updates split by importance, beside a loop over whole parameters that follows the same rules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_ops.optim
import ds_zero
from ds_config.errors import PlanError
from ds_testing import world
from ds_zero import Placement
from ds_zero.importance import Calendar, Importance, Votes, top_columns

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
    policy = ds_zero.UnitPolicy(max_numel=600, persist_numel=40)
    return net, ds_zero.shard(net, optimizer, importance=told, policy=policy, **options)


def train(bench, net, optimizer, steps):
    for step in steps:
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()


RULES = {
    "intervals": Importance(0.2, 6, 3),
    "warm-up": Importance(0.1, 0, 2, warm_up=3),
    "auto": Importance(0.3, 5, 0, auto_ratio=0.5),
    "every step": Importance(0.25, 1, 1),
    "all columns": Importance(1.0, 4, 2),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rules", list(RULES))
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
    tier = Placement("host") if placement == "host" else Placement("file", str(tmp_path), buffers=2)
    runs = []
    for options in ({}, {"tier": tier}):
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
    kept, scalars = {s.shard.name: s.data.clone() for s in one.shards()}, one.state_dict()
    two.materialize(sorted({name.rpartition("/")[2] for name in kept if name.startswith("optim/")}))
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
        ds_zero.shard(net, torch.optim.AdamW(net.parameters()), importance=Importance())
