"""A teacher that ds-zero shards without an optimizer teaches what a whole one teaches; what it computed is kept on disk."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from ds_compress import Distillation, Distiller, TeacherCache
from ds_testing import world

WHAT = Distillation(logits=1.0, hidden=0.5, temperature=2.0, layers=(("1", "3"),))


def net(seed, layers):
    torch.manual_seed(seed)
    inner = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(8, 3)).double()


def batch(step, rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def taught(student, teacher, inputs, *, cache=None, optimizer=None):
    """Losses of this rank's batches; gradients are means over ranks where the optimizer shards."""
    distiller = Distiller(student, teacher, WHAT, cache=cache)
    optimizer = optimizer or torch.optim.Adam(student.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        x = inputs(step % 2)
        loss = distiller.loss(student(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    distiller.close()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
@world(2)
def test_a_sharded_teacher_teaches_the_same(stage, tmp_path):
    rank, wanted = dist.get_rank(), net(1, 1)
    losses = taught(wanted, net(0, 2), lambda step: torch.cat([batch(step, r) for r in range(2)]))
    for cache in (None, TeacherCache(tmp_path)):
        teacher, student = net(0, 2), net(1, 1)
        sharding = ds_zero.shard(teacher, None, stage=3)
        optimizer = ds_zero.shard(student, torch.optim.Adam(student.parameters(), lr=0.05), stage=stage)
        found = taught(student, teacher, lambda step: batch(step, rank), cache=cache, optimizer=optimizer)
        mean = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(mean)
        assert (mean / 2).tolist() == pytest.approx(losses, rel=1e-6)
        assert all(p.grad is None for p in teacher.parameters())
        optimizer.close()
        sharding.close()
        for p, q in zip(student.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
    dist.barrier()
    assert len(list(tmp_path.glob("*.safetensors"))) == 4  # two batches of each rank, seen twice


@world(2)
def test_ranks_ask_a_sharded_teacher_together_where_only_one_has_its_batch(tmp_path):
    """A batch that one rank has on disk and the other has not: the teacher's collectives need both."""
    teacher, rank = net(0, 2), dist.get_rank()
    x = batch(5, rank)
    cache = TeacherCache(tmp_path / str(rank))
    if rank == 0:
        cache.get(((x,), {}), lambda: {"logits": net(0, 2)(x)})
    sharding = ds_zero.shard(teacher, None, stage=3)
    student, calls = net(1, 1), []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    distiller = Distiller(student, teacher, Distillation(), cache=cache)
    wanted = Distiller(student, net(0, 2), Distillation()).loss(student(x), x)
    for _ in range(2):
        assert distiller.loss(student(x), x).item() == pytest.approx(wanted.item(), rel=1e-12)
        assert len(calls) == 1
    sharding.close()
