"""What a sharded model costs, in counters that do not jitter; and that it gives everything back."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_monitor
import ds_zero
from ds_config.errors import ShardedAccessError
from ds_monitor.sinks import MemorySink
from ds_ops.stream import copy_ranges
from ds_testing import world

EVEN = ds_zero.UnitSizePolicy(max_numel=32 * 33, persist_numel=0)


def even():
    """Sizes that divide by ranks and lines, so that nothing is padded."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU())))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def unshown(net, optimizer, **options):
    """Shard as the engine does: gradients are not shown to the loop, so nothing is measured at the end of a backward."""
    return ds_zero.ShardedOptimizer(net, optimizer, ds_zero.ShardOptions(**options))


def train(net, optimizer, steps, micros=1):
    for _ in range(steps):
        for _ in range(micros):
            net(torch.randn(2, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sent_bytes(run):
    sink = MemorySink()
    ds_monitor.configure([sink])
    try:
        run()
    finally:
        ds_monitor.configure([])
    size, total = dist.get_world_size(), {}
    for record in sink.records:
        if record.name.startswith("comm/") and record.attrs.get("unit") not in (
            "step",
            "settle",
            "gradients",
            "order of gathers",
        ):
            share = {"comm/all_reduce": 2.0}.get(record.name, 1.0) * (size - 1) / size
            if record.name == "comm/all_to_all_pieces":
                share = 1.0  # it tells what was sent
            op = record.name.removeprefix("comm/")
            whole = record.attrs["nbytes"] * (size if op.startswith("all_gather") else 1)
            total[op] = total.get(op, 0) + share * whole
    return total


@pytest.mark.parametrize(("stage", "psis"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("overlap", [True, False])
@world(2)
def test_wire_bytes_are_the_theory(stage, psis, overlap):
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN, overlap=overlap)
    psi = 4 * sum(p.numel() for p in net.parameters())
    train(net, optimizer, 2)

    def run():
        train(net, optimizer, 1)
        optimizer.sharding.arrivals.finish()  # an operation is recorded when it has been waited for

    total = sent_bytes(run)
    assert sum(total.values()) == psis * psi * (dist.get_world_size() - 1) / dist.get_world_size(), total
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_a_steady_step_takes_no_new_buffer(stage):
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN)
    train(net, optimizer, 2, micros=2)
    held = optimizer.sharding.pool.fresh, optimizer.sharding.pool.bytes
    train(net, optimizer, 5, micros=2)
    assert (optimizer.sharding.pool.fresh, optimizer.sharding.pool.bytes) == held
    optimizer.close()


class Copies(TorchDispatchMode):
    """Bytes written by operators that move data or make memory for it, by operator; ds-ops' own is no operator of torch's."""

    MOVES = ("copy_", "clone", "cat", "_to_copy", "_foreach_copy_", "empty", "zeros", "empty_like", "zeros_like")

    def __init__(self):
        super().__init__()
        self.bytes = {}
        self._counting = mock.patch("ds_zero.runtime.reduce_strategies.copy_ranges", self._copy_ranges)

    def __enter__(self):
        self._counting.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._counting.stop()
        return super().__exit__(*error)

    def _copy_ranges(self, out, sources):
        numel = sum(n for _, ranges in sources for *_, n in ranges)
        self.bytes["copy_ranges"] = self.bytes.get("copy_ranges", 0) + numel * out.itemsize
        return copy_ranges(out, sources)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in self.MOVES:
            written = args[0] if name == "_foreach_copy_" else [out]
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in written)
        return out


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@world(2)
def test_a_steady_step_moves_each_gradient_once_and_nothing_else(stage, memory):
    """Into the buffer that ranks sum. No memory is made; parameters are gathered in place, at stage 3 from beside it."""
    net, twin = even(), even()
    psi = sum(p.nbytes for p in net.parameters())
    optimizer, plain = unshown(net, sgd(net), stage=stage, policy=EVEN, memory=memory), sgd(twin)

    def plain_step():
        twin(torch.randn(2, 32)).square().mean().backward()
        plain.step()
        plain.zero_grad()

    found = []
    for step in (lambda: train(net, optimizer, 1), plain_step):
        step(), step()
        with Copies() as copies:
            step()
        found.append(copies.bytes)
    ours = {name: size - found[1].get(name, 0) for name, size in found[0].items()}
    small = 1024  # a few numbers a parameter: norms, and who used what
    assert ours.pop("copy_ranges" if memory == "shared" else "_foreach_copy_") == psi
    if stage == 3 and memory == "private":
        ours["copy_"] -= 2 * psi // dist.get_world_size()  # a rank's own chunk, in forward and in backward
    assert all(size <= small for size in ours.values()), ours
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_on_shared_memory_a_rank_copies_only_what_others_read(stage):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.GELU(), nn.Linear(256, 256, bias=False))
    optimizer = unshown(net, sgd(net), stage=stage, memory="shared", clip=1.0)
    for _ in range(2):
        net(torch.randn(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Copies() as copies:
        net(torch.randn(2, 256)).square().mean().backward()
    assert copies.bytes["copy_ranges"] == sum(p.nbytes for p in net.parameters()) // 2
    assert copies.bytes.get("_foreach_copy_", 0) == 0
    assert copies.bytes.get("copy_", 0) == 0
    optimizer.close()


@pytest.mark.parametrize(("stage", "full", "grads"), [(0, 1.0, 1.0), (1, 1.0, 0.5), (2, 1.0, 0.5), (3, 0.0, 0.5)])
@world(2)
def test_bytes_between_steps_are_the_stages(stage, full, grads):
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN)
    psi = 4 * sum(p.numel() for p in net.parameters())
    train(net, optimizer, 1)
    held = {}
    for unit in optimizer.sharding.units:
        for what, size in unit.bytes.items():
            held[what] = held.get(what, 0) + size
    assert held["full"] == full * psi
    assert held["shard"] == (0.5 * psi if stage == 3 else 0)
    assert held["grad_full"] + held["grad_shard"] == grads * psi
    state = sum(
        v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
    )
    assert state == psi * (1.0 if stage == 0 else 0.5)
    optimizer.close()


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_the_plan_is_what_is_kept(stage, precision, memory):
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN, precision=precision, memory=memory)
    planned = ds_zero.plan(even(), 2, optimizer.sharding.options, state_tensors=1).persistent_bytes
    for _ in range(2):
        net(torch.randn(2, 32, dtype=next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = dict.fromkeys(("full", "shard", "grad_full", "grad_shard"), 0)
    for unit in optimizer.sharding.units:
        for what, size in unit.bytes.items():
            held[what] += size
    shares = 1 if stage == 0 or memory == "private" else dist.get_world_size()
    full = held["full"] if shares == 1 else sum(u.storage.home.nbytes for u in optimizer.sharding.units)
    assert full == planned["full"] * shares
    assert held["shard"] == planned["shard"]
    assert held["grad_full"] + held["grad_shard"] == planned["grads"]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sum(v.nbytes for v in state) == planned["optim"]
    optimizer.close()


@world(2)
def test_live_bytes_stay_within_the_budget(monkeypatch):
    """Stage 3 holds the unit in use and at most one more, unless a wait for another rank lasts long."""
    monkeypatch.setattr("ds_zero.runtime.reduce_runtime._PATIENCE_S", 1e9)  # on a busy machine they do
    net, most = even(), [0]
    optimizer = ds_zero.shard(net, sgd(net), stage=3, policy=EVEN)
    units = optimizer.sharding.units

    def watch(*_):
        most[0] = max(most[0], sum(u.full.untyped_storage().nbytes() > 0 for u in units))

    for module in net:
        module.register_forward_hook(watch)
        module.register_full_backward_hook(watch)
    train(net, optimizer, 3)
    assert 1 <= most[0] <= 2 < len(units)
    optimizer.close()


def tasks():
    """The system's threads. One that is ending is listed for a moment longer."""
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    return min(looks)


def facts():
    gc.collect()
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        len(dist.distributed_c10d._world.pg_map),
        tasks(),
    )


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_cycles(stage, cycles, memory="private"):
    """Create, train, close: what is left after each cycle, and how fast resident memory grows after the fifth."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    counts, sizes = [], []
    for _ in range(cycles):
        optimizer = ds_zero.shard(
            net,
            torch.optim.AdamW(net.parameters()),
            stage=stage,
            policy=ds_zero.UnitSizePolicy(persist_numel=0),
            memory=memory,
        )
        for _ in range(2):
            net(torch.randn(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        del optimizer
        counts.append(facts())
        sizes.append(resident())
    assert counts[3:] == [counts[3]] * len(counts[3:])
    assert slope(sizes[5:]) <= 1_000_000
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert all(type(p) is nn.Parameter and not p.__dict__ for p in net.parameters())


def slope(values):
    """Least squares, per step."""
    x = torch.arange(len(values), dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_close_leaves_nothing(stage):
    check_cycles(stage, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "memory"), [*((s, "private") for s in range(4)), (1, "shared"), (3, "shared")])
@world(2, timeout=300)
def test_thirty_cycles_leave_nothing(stage, memory):
    check_cycles(stage, 30, memory)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@world(2)
def test_dropping_everything_without_close_frees_it(stage, gradients):
    """Python's collector does not see `param.grad`: gradients that knew their model kept it where a loop ends with `step`."""
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN)
    train(net, optimizer, 2)
    if gradients:
        net(torch.randn(2, 32)).square().mean().backward()
        assert all(isinstance(param.grad, ds_zero.ShardedGradient) for param in net.parameters())
    dead = weakref.ref(optimizer.sharding), weakref.ref(optimizer.sharding.units[0])
    del net, optimizer
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


class Diary(nn.Module):
    """Keeps what it computed, graph and all, as many models of users do."""

    def __init__(self, where):
        super().__init__()
        self.body, self.head, self.where, self.last = even(), nn.Linear(32, 32), where, None

    def forward(self, x):
        hidden = self.body(x)
        out = self.head(hidden)
        self.last = {"hidden": hidden, "output": out, "loss": out.square().mean(), "parts": [{"hidden": hidden}]}[
            self.where
        ]
        return out


@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize("where", ["hidden", "output", "loss", "parts"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@world(2)
def test_a_model_that_keeps_its_graph_is_freed(stage, where, backwards):
    net = Diary(where)
    optimizer = ds_zero.shard(net, sgd(net), stage=stage, policy=EVEN)
    if backwards:
        train(net, optimizer, 1)
    net(torch.randn(2, 32))
    dead = weakref.ref(optimizer.sharding), weakref.ref(optimizer.sharding.units[0]), weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert [ref() for ref in dead] == [None, None, None]


@world(2)
def test_a_parameter_whose_model_is_gone_says_so():
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=3, policy=EVEN)
    train(net, optimizer, 1)
    weight = net[0].weight
    del net, optimizer
    gc.collect()
    assert "gone" in repr(weight)
    assert weight.shape == (32, 32)
    with pytest.raises(ShardedAccessError, match="is gone"):
        weight.sum()


@world(2)
def test_many_models_in_one_process_and_one_loss():
    """Actor at stage 3, critic at stage 2, frozen reference at stage 3: one joint loss, interleaved steps."""
    nets, twins = [[even().double() for _ in range(3)] for _ in range(2)]
    actor = ds_zero.shard(nets[0], sgd(nets[0]), stage=3, policy=EVEN)
    critic = ds_zero.shard(nets[1], sgd(nets[1]), stage=2, policy=EVEN)
    frozen = ds_zero.shard(nets[2].requires_grad_(False), stage=3, policy=EVEN)
    twins[2].requires_grad_(False)
    plain = [sgd(t) for t in twins[:2]]

    def loss(models, step, rank):
        x = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * step + rank))
        return (models[1](models[0](x)) - models[2](x)).square().mean() + models[0](x).mean()

    for step in range(4):
        loss(nets, step, dist.get_rank()).backward()
        for rank in range(2):
            (loss(twins, step, rank) / 2).backward()
        if step % 2:
            actor.step()
            actor.zero_grad()
            plain[0].step()
            plain[0].zero_grad()
        critic.step()
        critic.zero_grad()
        plain[1].step()
        plain[1].zero_grad()
    for sharded in (actor, critic, frozen):
        sharded.close()
    for net, twin in zip(nets, twins, strict=True):
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@world(2)
def test_an_input_that_is_trained_keeps_no_hook_of_a_graph_that_is_gone():
    net = even()
    optimizer = ds_zero.shard(net, sgd(net), stage=3, policy=EVEN, memory="private")
    x = torch.randn(2, 32, requires_grad=True)
    for _ in range(3):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net(x)  # and no backward
    assert not x._backward_hooks
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@world(2)
def test_units_of_many_sizes_have_as_many_buffers_as_are_in_use_at_one_time(precision):
    torch.manual_seed(0)
    sizes = [32, 48, 64, 80, 100, 128, 150, 175, 200]
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    policy = ds_zero.UnitSizePolicy(max_numel=1)
    optimizer = ds_zero.shard(net, sgd(net), stage=2, policy=policy, memory="private", precision=precision)
    for _ in range(2):
        net(torch.randn(2, 32).to(net[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    largest = max(unit.layout.numel for unit in optimizer.sharding.units)
    assert optimizer.sharding.pool.bytes <= 3 * 4 * largest < 4 * sum(u.layout.numel for u in optimizer.sharding.units)
    optimizer.close()
