"""Stages on devices: what travels between them is on the device again. In `nox -s gpu` between ranks on a card, with NCCL."""

from __future__ import annotations

import math

import pytest
import torch

import ds_pipe
from ds_testing.device_worlds import device_world


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("kind", ["plain", "tied", "skip"])
@device_world(2)
def test_two_stages(kind, schedule, bench, device):
    """A stage received tensors of the CPU."""
    bench.check(kind, 4, schedule=schedule, device=device, activation_checkpoint_interval=0)


@device_world(4)
def test_two_stages_of_two_replicas(bench, device):
    bench.check("tied", 4, num_stages=2, steps=1, device=device)


@device_world(2)
def test_batches_of_many_shapes(bench, device):
    bench.check("skip", 5, ragged=True, steps=2, device=device)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@device_world(2)
def test_stages_are_clipped_by_one_norm(norm_type, bench, device):
    single, cut = bench.Single("tied", device), bench.cut("tied").to(device)
    step = ds_pipe.pipeline(cut, 2)
    data = [(tokens.to(device), labels.to(device)) for tokens, labels in bench.batches(2)]
    single.step(data)
    step(data)
    ds_pipe.reduce_gradients(cut)
    wanted = torch.nn.utils.clip_grad_norm_(single.named().values(), 0.05, norm_type)
    assert float(ds_pipe.clip_grad_norm_(cut, 0.05, norm_type)) == pytest.approx(float(wanted), rel=1e-5)
    for name, param in cut.staged.named_logical():
        if name in single.named() and single.named()[name].grad is not None:
            torch.testing.assert_close(param.grad, single.named()[name].grad, atol=1e-6, rtol=1e-4)
    step.close()


@device_world(2)
def test_losses_of_an_evaluation_are_on_every_rank(bench, device):
    cut, single = bench.cut("plain").to(device), bench.Single("plain", device)
    step = ds_pipe.pipeline(cut, 2)
    data = [(tokens.to(device), labels.to(device)) for tokens, labels in bench.batches(2)]
    found = step(data)
    wanted = sum(float(bench.loss_fn(single(tokens), labels)) for tokens, labels in data) / 2
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    step.close()
