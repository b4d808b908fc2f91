"""torch.compile of a model that is sharded at stage 3, over gloo: our hooks run between the graphs, and numbers are those of an eager model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

import ds_zero
from ds_testing import world


class Block(nn.Module):
    """Its forward stands here: dynamo begins no graph in a file of torch's, so of nn.Sequential alone it compiles nothing."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def train(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    policy = ds_zero.UnitSizePolicy(max_numel=256, persist_numel=0)
    optimizer = ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, policy=policy)
    call = torch.compile(model, backend="eager") if how == "torch.compile" else model
    if how == "module.compile":
        model.compile(backend="eager")
    for step in range(3):
        call(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@world(2, timeout=120)
def test_it_trains_as_without_a_compiler(how):
    counters.clear()
    for a, b in zip(train(how), train("eager"), strict=True):
        torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] > 0


@world(2, timeout=120)
def test_nothing_of_ours_is_captured():
    """What torch calls between graphs was compiled like a user's function, and failed in the compiler."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    policy = ds_zero.UnitSizePolicy(max_numel=1, persist_numel=0)
    optimizer = ds_zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, policy=policy)
    net[1] = torch.compile(net[1], backend="eager")
    for used in (net, net[1]):
        used(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert not [m for m in get_compilation_metrics() if "ds_zero" in (m.co_filename or "")]


def test_a_hook_between_graphs_is_not_captured_and_nobody_is_warned():
    # The compiler warned of `set_eval_frame`, once in a process.
    program = """
import sys, warnings
warnings.simplefilter("error")
import torch
from ds_zero._torch import uncaptured
assert "torch._dynamo" not in sys.modules
class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin()
model, calls = Model(), []
model.register_forward_pre_hook(uncaptured(lambda module, args: calls.append(torch.compiler.is_compiling())))
model.compile(backend="eager")
assert torch.equal(model(torch.ones(2)), torch.ones(2).sin())
assert calls == [False]
from torch._dynamo.utils import counters, get_compilation_metrics
assert counters["stats"]["unique_graphs"] == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
