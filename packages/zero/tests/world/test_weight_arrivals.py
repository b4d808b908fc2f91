"""Stages 1 and 2: new weights travel after `step` has returned, and nothing sees old ones."""

from __future__ import annotations

import copy
import gc
import io
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_comm.transports import GlooTransport
from ds_testing import world
from ds_zero import _torch
from ds_zero.runtime.sharded_parameter import ShardedParameter
from ds_zero.runtime.weight_arrivals import modules_to_hook

SMALL = ds_zero.UnitSizePolicy(max_numel=300)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


def nothing_compiled() -> None:
    """Forget what other tests compiled in this rank's process, where a step would wait. Their compiled code is gone: the worker resets the compiler."""
    import torch._dynamo.utils

    _torch._compiled.clear()
    torch._dynamo.utils.counters.clear()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    data = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(data.to(next(model.parameters()).dtype)).square().mean()


def plain(steps: int) -> list[torch.Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def sharded(stage: int = 2, **options):
    nothing_compiled()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, ds_zero.shard(model, optimizer, stage=stage, policy=SMALL, **options)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_the_way(model: nn.Module) -> int:
    return sum(type(p) is ShardedParameter for p in model.parameters())


READS = {
    "detach": lambda ps: [p.detach().clone() for p in ps],
    "data": lambda ps: [p.data.clone() for p in ps],
    "last first": lambda ps: [p.detach().clone() for p in reversed(ps)][::-1],
    "foreach": lambda ps: list(torch._foreach_mul(ps, 1.0)),
    "arithmetic": lambda ps: [p + 0 for p in ps],
    "state_dict": lambda ps: [torch.stack([v]).clone()[0] for v in nn.ParameterList(ps).state_dict().values()],
    "deepcopy": lambda ps: list(copy.deepcopy(nn.ParameterList(ps))),
    "save": lambda ps: list(_saved(nn.ParameterList(ps))),
    "list": lambda ps: [torch.tensor(p.tolist()) for p in ps],
    "numpy": lambda ps: [torch.from_numpy(p.detach().numpy().copy()) for p in ps],
    "vector": lambda ps: [p.view_as(q) for p, q in zip(nn.utils.parameters_to_vector(ps).split([q.numel() for q in ps]), ps, strict=True)],
    "repr": lambda ps: [p.detach().clone() for p in ps if "released" not in repr(p) and "released" not in f"{p}"],
    "gathered": lambda ps: _gathered(ps),
}  # fmt: skip


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _gathered(params: list[nn.Parameter]) -> list[torch.Tensor]:
    with ds_zero.GatheredParameters(params):
        return [p.detach().clone() for p in params]


@pytest.mark.parametrize("stage", [1, 2])
@world(2)
def test_steps_return_while_weights_travel_and_every_read_sees_new_ones(stage):
    for name, read in READS.items():
        model, optimizer = sharded(stage)
        train(model, optimizer, 3)
        params = list(model.parameters())
        assert on_the_way(model) == len(params), name
        seen = read(params)
        assert on_the_way(model) == 0, name
        for a, b in zip(seen, plain(3), strict=True):
            torch.testing.assert_close(a.detach(), b, msg=lambda text, name=name: f"{name}: {text}")
        optimizer.close()
        assert all(type(p) is nn.Parameter for p in params)


@world(2)
def test_writes_wait_and_stay():
    model, optimizer = sharded()
    train(model, optimizer, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    expected = [0.5 * p for p in plain(2)]
    for p, b in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), b)
    train(model, optimizer, 1, first=2)  # the edit is adopted by the step
    assert not any(torch.equal(p.detach(), b) for p, b in zip(model.parameters(), plain(3), strict=True))
    optimizer.close()


@world(2)
def test_units_are_waited_for_block_by_block_in_forward():
    model, optimizer = sharded()
    train(model, optimizer, 1)
    left: list[int] = []
    hooks = [block.register_forward_hook(lambda *args: left.append(on_the_way(model))) for block in model]
    loss_of(model, 1).backward()
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1] == 0
    for hook in hooks:
        hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, first=2)
    for p, b in zip(model.parameters(), plain(3), strict=True):
        torch.testing.assert_close(p.detach(), b)
    optimizer.close()


@world(2)
def test_what_others_hold_of_the_memory_is_new_when_step_returns():
    model, optimizer = sharded()
    flat = [p.data.view(-1) for p in model.parameters()]
    train(model, optimizer, 2)
    assert on_the_way(model) == 0
    for a, b in zip(flat, plain(2), strict=True):
        torch.testing.assert_close(a, b.view(-1))
    del flat, a
    train(model, optimizer, 1, first=2)
    assert on_the_way(model) > 0
    optimizer.close()


@world(2)
def test_a_parameter_that_is_a_unit_of_its_own_does_not_hold_the_others_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 16), nn.Linear(16, 3))
    optimizer = ds_zero.shard(model, torch.optim.AdamW(model.parameters(), lr=0.05), stage=2, policy=SMALL)
    train(model, optimizer, 1)
    assert on_the_way(model) == 5
    optimizer.close()


@world(2)
def test_without_overlap_a_step_waits():
    model, optimizer = sharded(overlap=False)
    train(model, optimizer, 1)
    assert on_the_way(model) == 0
    optimizer.close()


@world(2)
def test_bf16_and_a_load_between_steps():
    results = []
    for waits in (True, False):
        model, optimizer = sharded(precision="bf16", overlap=not waits)
        train(model, optimizer, 2)
        kept = [shard.data.clone() for shard in optimizer.shards()]
        train(model, optimizer, 1, first=2)
        for shard, data in zip(optimizer.shards(), kept, strict=True):
            shard.data.copy_(data)
        optimizer.refresh()
        assert on_the_way(model) == 0  # a load ends on all ranks together
        train(model, optimizer, 2, first=3)
        results.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@world(2)
def test_a_compiler_that_comes_late_finds_plain_parameters():
    import torch._dynamo

    model, optimizer = sharded()
    train(model, optimizer, 2)
    assert on_the_way(model) > 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    train(compiled, optimizer, 2, first=2)
    assert on_the_way(model) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for p, b in zip(model.parameters(), plain(4), strict=True):
        torch.testing.assert_close(p.detach(), b)
    optimizer.close()
    torch._dynamo.reset()


@world(2)
def test_a_capture_waits_for_nothing_that_began_before(monkeypatch):
    model, optimizer = sharded()
    train(model, optimizer, 2)
    units = optimizer.sharding.units
    for unit in units:  # as a device that was waited for
        for work in unit.storage._works:
            work.wait()
    monkeypatch.setattr("ds_zero.runtime.weight_arrivals.streams.is_capturing", lambda device: True)
    monkeypatch.setattr("ds_comm.work.PendingWork.wait", lambda self, timeout=None: pytest.fail("waited in a capture"))
    optimizer.sharding.arrivals._streams[torch.device("cpu")] = None
    for p, b in zip(model.parameters(), plain(2), strict=True):
        torch.testing.assert_close(p.detach(), b)
    assert on_the_way(model) == 0
    monkeypatch.undo()
    optimizer.close()


@world(2)
def test_process_groups_may_go_before_weights_are_read():
    model, optimizer = sharded(group=dist.new_group([0, 1], backend="gloo"))
    train(model, optimizer, 2)
    del optimizer
    for p, b in zip(model.parameters(), plain(2), strict=True):
        torch.testing.assert_close(p.detach(), b)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@world(2)
def test_a_rank_that_drops_its_model_leaves_the_others_their_weights(stage, elsewhere):
    """Where a rank is late, the other's messages have not left when that one drops everything, and lives on without another word."""
    model, optimizer = sharded(stage, memory="private")
    train(model, optimizer, 1)
    late = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if late:
            send = GlooTransport.all_gather
            patch.setattr(GlooTransport, "all_gather", lambda *args: (time.sleep(0.05), send(*args))[1])
        train(model, optimizer, 1, first=1)
    assert late or on_the_way(model) > 0
    if not late:
        gc.disable()
        del model, optimizer
        collector = threading.Thread(target=gc.collect) if elsewhere else None
        if collector is None:
            gc.collect()
        else:
            collector.start()
            collector.join()
        gc.enable()
        return
    for p, b in zip(model.parameters(), plain(2), strict=True):
        torch.testing.assert_close(p.detach(), b)


PROGRAM = """
    import os, sys, torch, torch.distributed as dist, ds_zero
    from torch import nn
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    policy = ds_zero.UnitSizePolicy(max_numel=70_000)
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, policy=policy, memory="private")
    for _ in range(2):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 1:
        sys.exit()  # as a loop that ends does, without a word
    import time
    time.sleep(1)
    total = sum(p.double().sum() for p in model.parameters())
    assert total.isfinite()
    print("whole")
"""


def test_a_rank_that_ends_after_its_last_step_leaves_the_others_their_weights(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = ["env", *(f"{k}={v}" for k, v in env.items()), sys.executable, str(file)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "whole" in outputs[0]


def test_hooks_are_put_on_blocks_rather_than_on_what_is_in_them():
    model = build()
    number_of = {id(p): i // 3 for i, p in enumerate(model.parameters())}  # a block has four parameters
    chosen = modules_to_hook(model, number_of)
    assert [*chosen] == [*model]
    assert list(chosen.values()) == [1, 2, 3, 5, 5]
    alone = nn.ModuleDict({"weights": nn.ParameterList([nn.Parameter(torch.ones(1))])})
    assert modules_to_hook(alone, {id(p): 0 for p in alone.parameters()}) == {}
