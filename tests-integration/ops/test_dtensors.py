"""Optimizers on DTensors, which FSDP2's parameters are: the same as torch's on whole ones."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ds_comm.shm import shm_group
from ds_ops import optim
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")

PAIRS = {
    "AdamW": (lambda p: optim.AdamW(p, 0.05), lambda p: torch.optim.AdamW(p, 0.05)),
    "SGD": (lambda p: optim.SGD(p, 0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "Adagrad": (lambda p: optim.Adagrad(p, 0.05), lambda p: torch.optim.Adagrad(p, 0.05)),
}


@contextmanager
def shared_memory(meet):
    """A group without threads: torch's caches of DTensors keep the mesh, and with it the group, for as long as the process lives."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("shm", store=dist.FileStore(str(meet / "store"), size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def models():
    """One whole, one cut as FSDP2 does: of the last layer's three rows rank 1 has one, of its single bias none."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (2,))
    return whole, [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole.parameters()]


def give_gradients(whole, cut):
    for param, part in zip(whole.parameters(), cut, strict=True):
        part.grad = distribute_tensor(param.grad, part.device_mesh, part.placements)


@world(2, backend=None)
def test_parts_step_as_the_whole(tmp_path):
    """All of them refused: "has no memory"."""
    with shared_memory(tmp_path):
        check_steps()


def check_steps():
    for ours, theirs in PAIRS.values():
        whole, cut = models()
        mine, torchs = ours(cut), theirs(whole.parameters())
        for step in range(4):
            torchs.zero_grad()
            whole(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            give_gradients(whole, cut)
            for optimizer in (mine, torchs):
                optimizer.step()
        for part, param in zip(cut, whole.parameters(), strict=True):
            assert torch.allclose(part.full_tensor(), param, atol=1e-5)
            assert all(isinstance(v, DTensor) for v in mine.state[part].values() if isinstance(v, torch.Tensor))


@world(2, backend=None)
def test_what_needs_whole_tensors_sees_them(tmp_path):
    """Norms and matrices of a part are others than those of the whole; both were refused."""
    with shared_memory(tmp_path):
        check_whole()


def check_whole():
    def conv(layers):
        return [*layers, nn.Parameter(torch.linspace(-1, 1, 5 * 4 * 3).view(5, 4, 3).sin())]

    makers = (
        lambda params: optim.Lamb(params, 0.05, weight_decay=0.1),
        lambda params: optim.Muon(params, 0.05, weight_decay=0.1, adam_lr=0.01),
    )
    for make in makers:
        whole, cut = models()
        plain = conv(whole.parameters())
        plain[-1].muon_matrices = "flat"
        mesh = cut[0].device_mesh
        cut = [*cut, nn.Parameter(distribute_tensor(plain[-1].detach(), mesh, [Shard(1)]))]
        cut[0] = nn.Parameter(distribute_tensor(plain[0].detach(), mesh, [Replicate()]))
        cut[-1].muon_matrices = "flat"
        mine, reference = make(cut), make(plain)
        for step in range(4):
            for p, part in zip(plain, cut, strict=True):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                part.grad = distribute_tensor(p.grad, mesh, part.placements)
            mine.step()
            reference.step()
        for part, param in zip(cut, plain, strict=True):
            assert torch.allclose(part.full_tensor(), param, atol=1e-5)
            assert all(isinstance(v, DTensor) for v in mine.state[part].values() if isinstance(v, torch.Tensor))
