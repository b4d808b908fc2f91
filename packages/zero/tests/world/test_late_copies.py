"""Copies to a device that run late: what they read is written only after them.

There is no device here. `Late` stands for one: its copies have their values at once, and are checked when they would run.
"""

from __future__ import annotations

from collections import deque
from unittest import mock

import pytest
import torch
from torch import nn

import ds_ops.optim
import ds_zero
from ds_testing import world
from ds_zero import OffloadPolicy
from ds_zero.runtime import param_storage

WHOLE_UNITS = ds_zero.UnitSizePolicy(max_numel=256, persist_numel=0)


class Late:
    """A device that runs a copy when `lag` more are queued, or when somebody waits for it.

    Attributes:
        copies: How many were queued.
        wrong: How many of them read what was written after they were queued.
    """

    def __init__(self, lag, honest):
        self.lag, self.honest, self.copies, self.wrong = lag, honest, 0, 0
        self.queue = deque()

    def to_device(self, source, device):
        del device
        event = Event(self)
        self.queue.append((source, source.clone(), event))
        self.copies += 1
        while len(self.queue) > self.lag:
            self.run()
        return self.queue[-1][1].clone() if self.queue else source.clone(), event

    def run(self):
        source, expected, event = self.queue.popleft()
        event.happened = True
        self.wrong += not torch.equal(source, expected)


class Event:
    def __init__(self, device):
        self.device, self.happened = device, False

    def query(self):
        return self.happened or not self.device.honest

    def synchronize(self):
        while not self.query():
            self.device.run()


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))


def train(frozen, **options):
    """Five steps; weights are looked at and written in between, frozen ones too."""
    model = net()
    for layer in list(model)[::2] if frozen else ():
        layer.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ds_zero.shard(
        model, ds_ops.optim.AdamW(trained, lr=0.1), stage=3, policy=WHOLE_UNITS, overlap=True, **options
    )
    for step in range(5):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with ds_zero.GatheredParameters(list(model.parameters())[:2], modifier_rank=0), torch.no_grad():
            for param in list(model.parameters())[:2]:
                param.mul_(0.9)
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def places(folder):
    return {
        "host": {"offload_params": OffloadPolicy("host")},
        "host, early": {
            "offload_params": OffloadPolicy("host"),
            "offload_optimizer": OffloadPolicy("host", overlap_ratio=1.0),
        },
        "file": {"offload_params": OffloadPolicy("file", str(folder), buffer_count=2)},
        "all in files": {
            "offload_params": OffloadPolicy("file", str(folder), buffer_count=4),
            "offload_optimizer": OffloadPolicy("file", str(folder), buffer_count=2),
        },
        "no read ahead": {"offload_params": OffloadPolicy("file", str(folder), buffer_count=3, read_ahead=False)},
    }


def late(lag, options, *, frozen, honest=True):
    device = Late(lag, honest)
    with mock.patch.object(param_storage, "to_device", device.to_device):
        weights = train(frozen, **options)
    while device.queue:
        device.run()
    return device, weights


NAMES = ["host", "host, early", "file", "all in files", "no read ahead"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", NAMES)
@world(2)
def test_nothing_is_overwritten_before_it_was_copied(name, frozen, tmp_path):
    expected = train(frozen)
    for lag in (0, 1, 3, 1000):
        device, weights = late(lag, places(tmp_path)[name], frozen=frozen)
        assert device.copies > 0
        assert device.wrong == 0, lag
        for a, b in zip(weights, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_overwritten_before_it_was_copied_in_one_process(name, frozen, tmp_path):
    for lag in (0, 1, 3, 1000):
        device, _ = late(lag, places(tmp_path)[name], frozen=frozen)
        assert device.copies > 0
        assert device.wrong == 0, lag


@pytest.mark.parametrize("name", NAMES)
def test_without_events_it_would_be(name, tmp_path):
    device, _ = late(1000, places(tmp_path)[name], frozen=False, honest=False)
    assert device.wrong > 0
