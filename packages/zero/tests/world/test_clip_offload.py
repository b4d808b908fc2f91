"""torch's clipping, and edits of the optimizer's groups, where state is in host memory or in files, or is updated during backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_zero import OffloadPolicy

SLOW = pytest.mark.slow
STEPS, MICROS = 4, 2
PLACES = {
    "host": lambda folder: OffloadPolicy("host"),
    "early": lambda folder: OffloadPolicy("host", overlap_ratio=1.0),
    "file": lambda folder: OffloadPolicy("file", folder=str(folder)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def groups_of(net):
    body = [*net.a.parameters(), *net.b.parameters()]
    return [{"params": body, "lr": 0.02}, {"params": list(net.head.parameters()), "lr": 0.05, "weight_decay": 0.1}]


def rows(step, micro, size=1, rank=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + micro)).chunk(size)[rank]


def edit(optimizer, step):
    """What users change between backward and step."""
    first, second = optimizer.param_groups
    first["lr"] = 0.02 * 0.5**step
    second["weight_decay"] = 0.1 + 0.1 * step
    if step == 2:
        second["betas"] = (0.5, 0.9)


def train(net, optimizer, size=1, rank=0, edits=False, clip=0.05):
    norms = []
    for step in range(STEPS):
        for micro in range(MICROS):
            (net(rows(step, micro, size, rank)).square().mean() * 5.0 / MICROS).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        if edits:
            edit(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return norms


CASES = [
    pytest.param(
        place, stage, marks=() if (place, stage) in {("host", 2), ("early", 1), ("early", 3), ("file", 3)} else SLOW
    )
    for place in PLACES
    for stage in range(4)
]


@pytest.mark.parametrize("edits", [False, True], ids=["rates stay", "rates change"])
@pytest.mark.parametrize(("place", "stage"), CASES)
@world(2)
def test_torchs_clipping_equals_one_process(tmp_path, place, stage, edits):
    plain = Net()
    reference = torch.optim.AdamW(groups_of(plain), weight_decay=0.0)
    expected = train(plain, reference, edits=edits)
    net = Net()
    inner = ds_ops.optim.AdamW(groups_of(net), weight_decay=0.0)
    policy = ds_zero.UnitSizePolicy(max_numel=60, persist_numel=0)
    optimizer = ds_zero.shard(
        net, inner, stage=stage, policy=policy, memory="private", offload_optimizer=PLACES[place](tmp_path)
    )
    norms = train(net, optimizer, 2, dist.get_rank(), edits)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(math.isfinite(norm) and norm > 0.05 for norm in norms)  # each step was clipped
    optimizer.close()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(dict(net.named_parameters())[name], param, rtol=1e-4, atol=2e-6)
