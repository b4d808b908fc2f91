"""Updates that begin during backward: the same bits as without, whatever happens between backward and step."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_ops.optim
import ds_zero
from ds_comm.call import CollectiveCall
from ds_config.errors import KernelError, PlanError
from ds_testing import world
from ds_zero import OffloadPolicy
from ds_zero.policies.zenflow import ZenFlowOptions
from ds_zero.update.overlap_plan import Outlook, OverlapState

LATE, EARLY = OffloadPolicy("host"), OffloadPolicy("host", overlap_ratio=1.0)


def make(bench, *, offload_optimizer, name="plain", **options):
    net = bench.model(name)
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": params[i::3], "lr": 1e-2 * (i + 1), "weight_decay": 0.01 * i} for i in range(3)]
    options = {
        "policy": ds_zero.UnitSizePolicy(max_numel=600, persist_numel=40),
        "stage": 2,
        "memory": "private",
        **options,
    }
    return net, ds_zero.shard(net, ds_ops.optim.AdamW(groups), offload_optimizer=offload_optimizer, **options)


def wait(optimizer):
    """Until the thread has done what it was given."""
    ledger, end = optimizer.ahead.ledger, time.monotonic() + 150
    while any(ledger.state(unit) in (OverlapState.WAITING, OverlapState.WRITING) for unit in ledger.busy):
        assert time.monotonic() < end
        time.sleep(1e-4)


def backward(bench, net, optimizer, step, micros=1, scale=1.0):
    for micro in range(micros):
        optimizer.scale(bench.loss(net, bench.batch(step, micro, dist.get_rank())) * scale).backward()
    wait(optimizer)


def result(net, optimizer):
    found = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    for shard in optimizer.shards():
        found[shard.shard.name] = shard.data.clone()
    optimizer.close()
    for name, param in net.named_parameters():
        found[f"closed/{name}"] = param.detach().clone()
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def run(bench, tier, act=lambda net, optimizer, step: None, *, steps=6, micros=1, scales=(), **options):
    """Train; `act` is called between backward and step. What there is at the end, the norms, and the early updates that held or not."""
    net, optimizer = make(bench, offload_optimizer=tier, **options)
    norms, skipped = [], []
    for step in range(steps):
        backward(bench, net, optimizer, step, micros, dict(scales).get(step, 1.0))
        act(net, optimizer, step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if step % 2 else 1.0
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last.norm)
        skipped.append(optimizer.last.skipped)
    ledger = optimizer.ahead.ledger
    return result(net, optimizer), (norms, skipped), (ledger.retained, ledger.undone)


def both(bench, *args, **options):
    """Run without and with early updates: equal. Returns the norms, and how many held and were taken back."""
    late, told, none = run(bench, LATE, *args, **options)
    early, told_early, counts = run(bench, EARLY, *args, **options)
    same(early, late)
    assert str(told) == str(told_early)
    assert none == (0, 0)
    return told, counts


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@world(2)
def test_twenty_steps_have_the_same_bits(bench, stage, precision):
    options = {"stage": stage, "precision": precision, "steps": 20}
    _, (held, undone) = both(bench, clip=float("inf"), **options)
    assert held > 0
    assert undone > 0  # the rates that `run` changes before a step
    scales = {step: 1.0 if step in (4, 5, 12) else 0.1 for step in range(20)}  # few steps are clipped
    if precision != "fp32":  # which would go on with what is not finite
        scales[8] = float("inf")
    for micros in (1, 3):
        (norms, skipped), (held, undone) = both(bench, clip=0.4, micros=micros, scales=scales, **options)
        assert [norms[step] > 0.4 for step in (4, 5, 6, 12, 13)] == [True, True, False, True, False]
        assert skipped[8] == (precision != "fp32")
        assert held > 0
        assert undone > 0


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_every_memory_and_stage(bench, stage, memory):
    _, (held, _) = both(bench, stage=stage, memory=memory, precision="bf16", clip=100.0)
    assert held > 0


@world(2)
def test_an_update_that_is_always_clipped_is_taken_back_and_then_not_begun(bench):
    _, counts = both(bench, clip=1e-3)
    assert counts == (0, 0)
    with mock.patch.object(Outlook, "last", lambda self, backward: backward == self.backwards):
        _, (held, undone) = both(bench, clip=1e-3)
    assert held == 0
    assert undone > 0


@pytest.mark.parametrize(
    "name", ["tied", "reused", "frozen", "unused", "reentrant", "reentrant_reused", "mixed", "zero_size"]
)
@world(2)
def test_models_of_every_kind(bench, name):
    _, (held, _) = both(bench, name=name, stage=3)
    assert held > 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("who", ["everyone", "one"])
@world(2)
def test_parameters_that_are_used_now_and_then(bench, stage, who):
    """Momentum must not move what nobody used; what one rank used is moved on all."""
    found = []
    for tier in (LATE, EARLY):
        net, optimizer = make(bench, offload_optimizer=tier, stage=stage)
        for step in range(8):
            block, rank = net.blocks[1], dist.get_rank()
            leaves_out = step in (3, 4, 6) and (who == "everyone" or rank == 0)
            plain = block.forward
            if leaves_out:
                block.forward = lambda x: x
            bench.loss(net, bench.batch(step, 0, rank)).backward()
            block.forward = plain
            wait(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        held = optimizer.ahead.ledger.retained
        found.append(result(net, optimizer))
    same(*found)
    assert held > 0


@world(2)
def test_formats_that_differ_and_replicas(bench):
    narrow = ds_zero.Precision(
        param=torch.bfloat16, accumulate=torch.bfloat16, master=torch.float32, skip_nonfinite=True
    )
    for options in ({"precision": narrow}, {"shard_size": 1}, {"overlap": False}, {"strict": True}):
        _, (held, _) = both(bench, clip=100.0, **options)
        assert held > 0, options


@world(1)
def test_one_rank(bench):
    for stage in (0, 3):
        _, (held, _) = both(bench, stage=stage, clip=100.0, micros=2)
        assert held > 0


@world(2)
def test_part_of_the_state_on_the_device(bench):
    late = run(bench, OffloadPolicy("host", ratio=0.5))
    early = run(bench, OffloadPolicy("host", ratio=0.5, overlap_ratio=0.5))
    same(late[0], early[0])
    assert early[2][0] > 0


@pytest.mark.parametrize(
    "told",
    [
        ZenFlowOptions(ratio=0.25, interval=3, choose_every=6, warm_up=2),
        ZenFlowOptions(ratio=0.25, interval=0),
        ZenFlowOptions(interval=1),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@world(2)
def test_updates_split_by_importance(bench, told, precision):
    scales = {5: float("inf")} if precision == "fp16" else {}
    _, (held, undone) = both(bench, updates=told, precision=precision, scales=scales, steps=14, clip=100.0)
    assert (held > 0) == (told.interval > 0)
    assert (undone > 0) == (told.interval > 0)


# ---- between backward and step


def looks(net, optimizer, step):
    for param in net.parameters():
        ds_zero.safe_get_full_grad(param)
    if step == 2:
        ds_zero.safe_get_full_fp32_param(net.head.weight)
        assert ds_zero.safe_get_full_optimizer_state(net.head.weight, "exp_avg") is not None


def sets_a_gradient(net, optimizer, step):
    if step > 1:
        grad = ds_zero.safe_get_full_grad(net.head.weight)
        ds_zero.safe_set_full_grad(net.head.weight, grad * 0.5)


def sets_state(net, optimizer, step):
    if step == 3:
        value = ds_zero.safe_get_full_fp32_param(net.head.weight)
        ds_zero.safe_set_full_fp32_param(net.head.weight, value * 0.9)
        state = ds_zero.safe_get_full_optimizer_state(net.blocks[0].up.weight, "exp_avg")
        ds_zero.safe_set_full_optimizer_state(net.blocks[0].up.weight, state * 2, "exp_avg")


def edits(net, optimizer, step):
    with ds_zero.GatheredParameters(net.parameters(), write=True), torch.no_grad():
        for param in net.parameters() if step % 2 else ():
            param.mul_(0.99)


def more(net, optimizer, step):
    """Another backward than there was in the steps before."""
    if step == 4:
        net(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()


def drops(net, optimizer, step):
    if step == 3:
        optimizer.zero_grad()
        net(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()


def drops_by_the_model(net, optimizer, step):
    if step == 3:
        net.zero_grad()
        net(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()


def leaves(net, optimizer, step):
    if step == 3:
        optimizer.suspend(pin_memory=False)
        assert not optimizer.ahead.ledger.busy
        optimizer.resume()


def changes_rates(net, optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def divides(net, optimizer, step):
    optimizer.divisor = 1.0 if step % 3 else 3.0


def freezes(net, optimizer, step):
    if step == 3:
        net.head.weight.requires_grad_(False)
        optimizer.replan()
        net(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()


ACTS = [
    looks, sets_a_gradient, sets_state, edits, more, drops, drops_by_the_model, leaves, changes_rates, divides, freezes,
]  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@world(2)
def test_whatever_happens_in_between(bench, act, stage):
    both(bench, act, stage=stage)


@pytest.mark.parametrize("memory", ["private", "shared"])
@world(2)
def test_edits_without_a_trace(bench, memory):
    def edited(net, optimizer, step):
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.999)

    both(bench, edited, stage=1, memory=memory)


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_only_the_thread_that_runs_the_model_communicates(bench, stage):
    """Two communicators are safe on a device because no two threads call collectives in an order that nobody decides (decision 0012)."""
    seen, threads = set(), set()
    net, optimizer = make(bench, offload_optimizer=EARLY, stage=stage)
    plain = CollectiveCall.start

    def start(call, *args, **options):
        seen.add(threading.current_thread().name)
        threads.update(thread.name for thread in threading.enumerate())
        return plain(call, *args, **options)

    helps = mock.patch(
        "ds_zero.runtime.reduce_runtime._PATIENCE_S", 60.0
    )  # while the model's thread waits for a slow rank, not here
    with mock.patch.object(CollectiveCall, "start", start), helps:
        for step in range(2):
            backward(bench, net, optimizer, step, micros=2)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    assert seen == {threading.current_thread().name}
    assert any(name.startswith("ds-zero") for name in threads)  # there are others, which could


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_what_is_saved_in_between_is_the_last_step(bench, stage):
    net, optimizer = make(bench, offload_optimizer=EARLY, stage=stage)
    for step in range(2):
        backward(bench, net, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    before = {s.shard.name: s.data.clone() for s in optimizer.shards()}, str(optimizer.common_state_dict())
    backward(bench, net, optimizer, 2)
    assert optimizer.ahead.ledger.busy
    scalars = str(optimizer.common_state_dict())
    after = {s.shard.name: s.data.clone() for s in optimizer.shards()}, scalars
    same(before[0], after[0])
    assert before[1] == after[1]
    backward(bench, net, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2])
@world(2)
def test_a_backward_that_raises_leaves_nothing_behind(bench, stage):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("stop")

    def stops(net, optimizer, step):
        if step != 3:
            return
        optimizer.zero_grad()
        tokens = bench.batch(step, 5, dist.get_rank())
        with pytest.raises(ArithmeticError, match="stop"):
            net.head(net.body(Stop.apply(net.embed(tokens)))).sum().backward()
        wait(optimizer)
        optimizer.zero_grad()
        bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()

    both(bench, stops, stage=stage)


# ---- when the thread fails, and when it ends


@contextmanager
def failing(optimizer, *, after_writing):
    """The thread's updates fail on rank 1."""
    updater, plain = optimizer.updater, optimizer.updater.early

    def early(unit, grads, factor):
        if after_writing:
            plain(unit, grads, factor)
        raise MemoryError("no room")

    if dist.get_rank() == 1:
        updater.early = early
    yield
    updater.__dict__.pop("early", None)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("after_writing", [False, True])
@world(2)
def test_an_error_on_one_rank_is_one_on_all_and_nothing_is_lost(bench, stage, after_writing):
    expected, *_ = run(bench, LATE, stage=stage)
    net, optimizer = make(bench, offload_optimizer=EARLY, stage=stage)
    for step in range(6):
        if step == 3:
            before = {s.shard.name: s.data.clone() for s in optimizer.shards()}
            with failing(optimizer, after_writing=after_writing):
                backward(bench, net, optimizer, step)
                with pytest.raises(KernelError, match="failed on 1 ranks") as caught:
                    optimizer.step()
            assert caught.value.code == "zero-early-failed"
            assert isinstance(caught.value.__cause__, MemoryError) == (dist.get_rank() == 1)
            assert ("no room" in str(caught.value)) == (dist.get_rank() == 1)
            same({s.shard.name: s.data.clone() for s in optimizer.shards()}, before)
        else:
            backward(bench, net, optimizer, step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if step % 2 else 1.0
        optimizer.step()
        optimizer.zero_grad()
    same(result(net, optimizer), expected)


@world(2)
def test_closing_waits_for_the_thread_and_keeps_the_last_step(bench):
    running = set(threading.enumerate())
    net, optimizer = make(bench, offload_optimizer=EARLY)
    for step in range(2):
        backward(bench, net, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    before = {name: ds_zero.safe_get_full_fp32_param(p).clone() for name, p in net.named_parameters()}
    began, go, plain = threading.Event(), threading.Event(), optimizer.updater.early

    def slow(unit, grads, factor):
        began.set()
        go.wait(60)
        plain(unit, grads, factor)

    optimizer.updater.early = slow
    bench.loss(net, bench.batch(2, 0, dist.get_rank())).backward()
    assert began.wait(60)
    threading.Timer(0.05, go.set).start()
    optimizer.close()
    for name, param in net.named_parameters():
        assert torch.equal(param.detach(), before[name]), name
    assert not [t for t in set(threading.enumerate()) - running if t.name == "ds-zero-early"]


@world(2)
def test_a_step_that_comes_while_the_thread_is_slow_makes_the_rest_itself(bench):
    expected, *_ = run(bench, LATE, changes_nothing)
    net, optimizer = make(bench, offload_optimizer=EARLY)
    plain = optimizer.updater.early

    def slow(unit, grads, factor):
        time.sleep(0.02)
        plain(unit, grads, factor)

    optimizer.updater.early = slow
    for step in range(6):
        optimizer.scale(bench.loss(net, bench.batch(step, 0, dist.get_rank()))).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if step % 2 else 1.0
        optimizer.step()
        optimizer.zero_grad()
    same(result(net, optimizer), expected)


def changes_nothing(net, optimizer, step):
    """As many steps as the others."""


@world(2)
def test_several_models_at_once(bench):
    expected = [run(bench, LATE, name=name)[0] for name in ("plain", "tied")]
    pairs = [make(bench, offload_optimizer=EARLY, name=name) for name in ("plain", "tied")]
    for step in range(6):
        for net, _ in pairs:
            bench.loss(net, bench.batch(step, 0, dist.get_rank())).backward()
        for _, optimizer in pairs:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9 if step % 2 else 1.0
            optimizer.step()
            optimizer.zero_grad()
    for pair, wanted in zip(pairs, expected, strict=True):
        same(result(*pair), wanted)


@world(2)
def test_who_reads_shards_is_asked_before_the_first_write(bench):
    net, optimizer = make(bench, offload_optimizer=EARLY)
    seen = []
    optimizer.before_update = lambda: seen.append(optimizer.ahead.ledger.busy)
    for step in range(3):
        seen.clear()
        backward(bench, net, optimizer, step)
        assert seen == ([[]] if step else [])
        assert bool(optimizer.ahead.ledger.busy) == bool(seen)
        optimizer.step()
        optimizer.zero_grad()
    seen.clear()
    bench.loss(net, bench.batch(3, 0, dist.get_rank())).backward()
    optimizer.shards()  # somebody may read them until the next write
    ds_zero.safe_get_full_grad(net.embed.weight)  # the backward has waited for the last sum, so nothing is written
    assert len(seen) == 1
    optimizer.close()


@world(2)
def test_optimizers_whose_updates_cannot_begin_early(bench):
    class Own(ds_ops.optim.AdamW):
        def step(self, closure=None, **options):
            return super().step(closure, **options)

    kinds = [torch.optim.AdamW, ds_ops.optim.Lamb, ds_ops.optim.Muon, Own]
    for kind in kinds:
        net = bench.model("plain")
        with pytest.raises(PlanError, match=kind.__name__) as caught:
            ds_zero.shard(net, kind(net.parameters(), lr=1e-2), stage=2, offload_optimizer=EARLY)
        assert caught.value.code == "zero-early"
