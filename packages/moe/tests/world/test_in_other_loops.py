"""Layers of experts in programs that were written for plain ones."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ds_moe import place_experts
from ds_testing import world


def test_copies_and_saved_objects_compute_the_same(bench):
    net = bench.model(k=2)
    place_experts(net)
    x, file = bench.batch(0), io.BytesIO()
    wanted = net(x)
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), wanted)


def test_recomputed_layers_have_the_same_gradients(bench):
    net, x = bench.model(k=2), bench.batch(0).requires_grad_()
    net(x).backward()
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    checkpoint(net, x, use_reentrant=False).backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
@world(2)
def test_options_of_ddp(bench, option):
    net, whole, rank = bench.model(2, dist.get_rank(), k=2), bench.model(k=2), dist.get_rank()
    placed = place_experts(net)
    ddp = DistributedDataParallel(net, **{option: True})
    for step in range(3):
        ddp(bench.batch(rank, step=step)).backward()
        (sum(bench.dense(whole, bench.batch(r, step=step)) for r in range(2)) / 2).backward()
    placed.close()
    found = bench.logical({name: p.grad for name, p in net.named_parameters()}, rank, 2)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    bench.close({n: g for n, g in found.items() if g is not None}, wanted, 1e-9)
