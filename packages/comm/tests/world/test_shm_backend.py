"""torch.distributed, DDP and FSDP2 run on `shm` unchanged, with the numbers of gloo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_comm
from ds_comm.shm import shm_group
from ds_config.errors import CommError, UnsupportedError
from ds_testing import world

pytestmark = pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm backend here: {shm_group.available()}")


def on(backend: str, meet: Path, body: Callable[[], object]) -> object:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(meet / backend), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    try:
        return body()
    finally:
        dist.destroy_process_group()


def everything() -> list[torch.Tensor]:
    """Results of the whole torch API on tensors of awkward shapes; collected to be compared between backends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    seen: list[torch.Tensor] = []
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        y = x.clone()
        dist.all_reduce(y, op)
        seen.append(y)
    strided = torch.zeros(3, 4).t()
    strided.copy_(x.sum() * torch.ones(4, 3))
    dist.all_reduce(strided)
    seen.append(strided.clone())
    parts = [torch.empty(2, 3) for _ in range(n)]
    dist.all_gather(parts, x)
    seen += parts
    whole = torch.empty(2 * n, 3)
    dist.all_gather_single(whole, x)
    seen.append(whole)
    mine = torch.empty(2, 3)
    dist.reduce_scatter_single(mine, whole * (rank + 1))
    seen.append(mine)
    dist.reduce_scatter(mine, [p + rank for p in parts])
    seen.append(mine.clone())
    for root in range(n):
        z = x.clone()
        dist.broadcast(z, root)
        dist.reduce(y := z + rank, root)
        into = [torch.empty(2, 3) for _ in range(n)] if rank == root else None
        dist.gather(x, into, root)
        dist.scatter(mine, [x + r for r in range(n)] if rank == root else None, root)
        seen += [z, y if rank == root else z, mine.clone(), *(into or [])]
    send = [(rank + r) % 3 for r in range(n)]
    received = torch.empty(sum((rank + r) % 3 for r in range(n)), 2)
    dist.all_to_all_single(received, torch.arange(2.0 * sum(send)).view(-1, 2) + 100 * rank, send, send)
    seen.append(received)
    works = []
    for i in range(5):
        t = torch.full((1000,), float(i + rank))
        works.append(dist.all_reduce(t, async_op=True))
        seen.append(t)
    for work in works:
        work.wait()
    future = dist.all_reduce(f := x.clone(), async_op=True).get_future()
    future.wait()
    seen += [f, functional.all_reduce(x, "sum", dist.group.WORLD) + 0]
    objects: list[object] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)]
    peer_to, peer_from = (rank + 1) % n, (rank - 1) % n
    if n > 1:
        ring = torch.empty(7)
        ops = [
            dist.P2POp(dist.isend, torch.full((7,), float(rank)), peer_to),
            dist.P2POp(dist.irecv, ring, peer_from),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        seen.append(ring)
    dist.barrier()
    return seen


@world(3, backend=None)
def test_the_whole_api_gives_what_gloo_gives(tmp_path: Path) -> None:
    ours, theirs = on("shm", tmp_path, everything), on("gloo", tmp_path, everything)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):  # type: ignore[call-overload]
        torch.testing.assert_close(a, b, msg=lambda m, i=i: f"result {i}: {m}")


@world(1, backend=None)
def test_one_rank_takes_the_same_path(tmp_path: Path) -> None:
    ours, gloos = on("shm", tmp_path, everything), on("gloo", tmp_path, everything)
    assert len(ours) == len(gloos) > 10
    for mine, theirs in zip(ours, gloos, strict=True):
        assert torch.equal(mine, theirs)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    # 2, 3 and 4 ranks all get uneven shards of 35 rows.
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(35, 35), nn.GELU())])


def train(module: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5, foreach=False), []
    for step in range(5):
        x = torch.randn(8, 35, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp() -> tuple[list[float], list[torch.Tensor]]:
    module = DistributedDataParallel(model())
    return train(module), [p.detach().clone() for p in module.parameters()]


def fsdp() -> tuple[list[float], list[torch.Tensor]]:
    module = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module), [p.full_tensor().clone() for p in module.parameters()]  # type: ignore[attr-defined]


TRAINED = {"ddp": ddp, "fsdp2": fsdp}


@pytest.mark.parametrize("name", TRAINED)
@world(2, backend=None)
def test_ddp_and_fsdp2_train_to_the_bits_of_gloo(name: str, tmp_path: Path) -> None:
    losses, params = on("shm", tmp_path, TRAINED[name])  # type: ignore[misc]
    expected_losses, expected = on("gloo", tmp_path, TRAINED[name])  # type: ignore[misc]
    assert losses == expected_losses
    assert all(map(torch.equal, params, expected))


def check_more_ranks(meet: Path) -> None:
    """More than two terms gloo adds in another order."""
    ours, theirs = (on(backend, meet, lambda: [how() for how in TRAINED.values()]) for backend in ("shm", "gloo"))
    for (losses, params), (expected_losses, expected) in zip(ours, theirs, strict=True):  # type: ignore[call-overload]
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for ours_p, theirs_p in zip(params, expected, strict=True):
            torch.testing.assert_close(ours_p, theirs_p, rtol=1e-5, atol=1e-7)


@world(3, backend=None)
def test_ddp_and_fsdp2_on_three_ranks(tmp_path: Path) -> None:
    check_more_ranks(tmp_path)


@world(4, backend=None)
def test_ddp_and_fsdp2_on_four_ranks(tmp_path: Path) -> None:
    check_more_ranks(tmp_path)


@world(4, backend=None)
def test_subgroups_have_memory_of_their_own(tmp_path: Path) -> None:
    def body() -> None:
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [1, 3])]
        for i, group in enumerate(groups):
            if dist.get_rank() in dist.get_process_group_ranks(group) if group is not None else False:
                t = torch.ones(3) * (dist.get_rank() + 1)
                dist.all_reduce(t, group=group)
                assert t[0].item() == [3, 7, 6][i]
        dist.barrier()

    on("shm", tmp_path, body)


@world(2, backend=None)
def test_a_monitored_barrier_names_who_did_not_come(tmp_path: Path) -> None:
    def body() -> None:
        ds_comm.monitored_barrier(timeout=timedelta(seconds=20))
        store = dist.FileStore(str(tmp_path / "late"), 2)
        if dist.get_rank() == 0:
            with pytest.raises(CommError, match="rank 1 did not come") as caught:
                ds_comm.monitored_barrier(timeout=timedelta(seconds=0.2))
            assert caught.value.code == "comm-timeout"
            store.set("over", "")
        else:
            store.wait(["over"])

    on("shm", tmp_path, body)


@world(2, backend=None)
def test_errors_name_what_to_do_and_nothing_is_left(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(UnsupportedError, match="any source"):
            dist.recv(torch.empty(1))
        with pytest.raises(CommError, match="came with another operation"):
            dist.all_reduce(torch.ones(2 + dist.get_rank()))

    before = threading.active_count()
    on("shm", tmp_path, body)
    assert threading.active_count() == before
