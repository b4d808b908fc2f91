"""What is beyond the contract (test_contract.py): odd dtypes, uneven sizes, handles, groups and spans."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_config.errors import CommError
from ds_testing import world


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes; fractions that do not add exactly."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * salt + rank)).to(dtype)


@world(2)
def test_dtypes_gloo_does_not_know_move_too() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64):
        mine, out = torch.full((3,), rank + 1).to(dtype), torch.zeros(6).to(dtype)
        ds_comm.all_gather_single(out, mine)
        ds_comm.broadcast(mine, 1)
        assert out.to(torch.complex64).tolist() == [1, 1, 1, 2, 2, 2]
        assert mine.to(torch.complex64).tolist() == [2, 2, 2]


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT])
@pytest.mark.parametrize("shape", [(), (3, 2), (2, 1, 4)])
@world(3)
def test_what_is_no_sum_is_reduced_and_scattered_in_any_shape(shape: tuple[int, ...], op: dist.ReduceOp) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.full(shape, rank + part + 1) for part in range(size)]
    terms = [r + rank + 1 for r in range(size)]
    expected = max(terms) if op == dist.ReduceOp.MAX else math.prod(terms)
    listed, whole = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    ds_comm.reduce_scatter(listed, parts, op)
    ds_comm.reduce_scatter_single(whole, torch.stack(parts), op)
    assert bool((listed == expected).all())
    assert bool((whole == expected).all())


@world(2)
def test_sums_of_two_are_the_bits_of_ddp() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = values(dist.get_rank(), 999, dtype)
        torchs, ours = mine.clone(), mine.clone()
        dist.all_reduce(torchs)
        ds_comm.all_reduce(ours)
        assert torch.equal(torchs, ours)


@world(3)
def test_sizes_may_differ_between_ranks() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(r) for r in range(3)]
    ds_comm.all_gather(outs, torch.full((rank,), float(rank)))
    assert [out.tolist() for out in outs] == [[], [1.0], [2.0, 2.0]]
    sent = [torch.full((rank + to,), 10.0 * rank + to) for to in range(3)]
    received = [torch.empty(rank + source) for source in range(3)]
    ds_comm.all_to_all(received, sent)
    for source, part in enumerate(received):
        assert part.tolist() == [10.0 * source + rank] * (rank + source)
    splits = [rank + to for to in range(3)]
    out = torch.empty(sum(splits), 2)
    ds_comm.all_to_all_single(out, torch.cat(sent).unsqueeze(1).expand(-1, 2).contiguous(), splits, splits)
    assert torch.equal(out[:, 0], torch.cat(received))


@world(2)
def test_async_handles_complete_in_any_order() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((1000,), float(rank + i)) for i in range(8)]
    works = [ds_comm.all_reduce(tensor, async_op=True, unit=f"t{i}") for i, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [2 * i + 1 for i in range(8)]


@world(3)
def test_messages() -> None:
    rank = dist.get_rank()
    right, left = (rank + 1) % 3, (rank - 1) % 3
    out = torch.empty(4)
    works = ds_comm.batch_isend_irecv(
        [ds_comm.P2POp(ds_comm.isend, torch.full((4,), float(rank)), right), ds_comm.P2POp(ds_comm.irecv, out, left)]
    )
    for work in works:
        work.wait()
    assert out.tolist() == [float(left)] * 4
    if rank == 0:
        ds_comm.send(torch.tensor([7.0]), 2, tag=5)
    if rank == 2:
        one = torch.zeros(1)
        ds_comm.recv(one, 0, tag=5)
        assert one.item() == 7
        ds_comm.send_object_list(["x", 1], 1)
    if rank == 1:
        anyone = [None, None]
        ds_comm.recv_object_list(anyone, 2)
        assert anyone == ["x", 1]


@world(2)
def test_batches_and_monitored_barriers_are_operations_of_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_comm import call, p2p
    from ds_comm.watch.recorder import _Off

    seen: list[tuple[str, str, int]] = []

    class Seen(_Off):
        def begin(self, order: object, mark: int, what: tuple[str, str, int], tensor: object) -> int:
            seen.append((*what[:2], mark))
            return 0

    monkeypatch.setattr(call, "current", Seen)
    peer, out = 1 - dist.get_rank(), torch.empty(3)
    mark = ds_comm.world_group().order.mark
    ops = [
        ds_comm.P2POp(ds_comm.isend, torch.full((3,), 5.0), peer, unit="pair"),
        ds_comm.P2POp(ds_comm.irecv, out, peer),
    ]
    for work in p2p._fused(ops):  # what a batch on a device is
        work.wait()
    assert out.tolist() == [5.0] * 3
    ds_comm.monitored_barrier(unit="save")
    assert seen == [("batch_isend_irecv", "pair", 0), ("monitored_barrier", "save", mark + 1)]


@world(2)
def test_raw_process_groups_and_none_are_groups() -> None:
    pair = ds_comm.new_group([1, 0], "pair")
    assert pair is not None
    assert pair.pg is dist.group.WORLD
    for group in (None, dist.group.WORLD, pair):
        x = torch.ones(1)
        ds_comm.all_reduce(x, group=group)
        assert x.item() == 2
    assert ds_comm.as_group(None).order is pair.order


@world(3)
def test_a_group_of_some_ranks() -> None:
    rank = dist.get_rank()
    group = ds_comm.new_group([0, 2], "ends")
    assert (group is None) == (rank == 1)
    if group is not None:
        x = torch.tensor([float(rank)])
        ds_comm.all_reduce(x, group=group)
        assert x.item() == 2
        ds_comm.broadcast(x, 2, group=group)
        assert group.index(2) == 1
        ds_comm.monitored_barrier(group)


@world(2)
def test_spans_are_reported_with_what_was_sent() -> None:
    import ds_monitor

    sink = ds_monitor.MemorySink()
    ds_monitor.configure([sink])
    try:
        ds_comm.all_gather_single(torch.empty(8), torch.zeros(4), unit="layers.0")
    finally:
        ds_monitor.configure([])
    (span,) = [record for record in sink.records if record.name == "comm/all_gather_single"]
    told = {"unit": "layers.0", "group": "world", "ranks": 2, "nbytes": 16, "dtype": "float32"}
    assert {name: span.attrs[name] for name in told} == told
    assert span.attrs.keys() - told.keys() == {"key", "place"}  # by which traces of ranks are put together


@world(2)
def test_a_tensor_with_a_history_is_its_values_here() -> None:
    rank = dist.get_rank()
    leaf = torch.tensor([rank + 1.0], requires_grad=True)
    loss, parts = leaf * 1.0, torch.zeros(2)
    ds_comm.all_gather_single(parts, loss)
    ds_comm.all_reduce(loss)
    assert (loss.item(), parts.tolist()) == (3.0, [1.0, 2.0])
    (loss / 2).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0.5


@world(2)
def test_a_forked_child_is_no_rank() -> None:
    """What it sends, the rank would read as its own; the rank itself goes on."""
    ds_comm.all_reduce(torch.ones(3))
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        told = "no error"
        try:
            ds_comm.all_reduce(torch.ones(3), unit="step")
        except CommError as error:
            told = f"{error.code} {error.message}"
        finally:
            os.write(writes, told.encode())
            os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reads, 1000).decode()
    assert told.startswith(
        f"comm-forked all_reduce[step] of group 'world' in process {child}, which was forked from a rank"
    )
    ds_comm.all_reduce(total := torch.ones(3))
    assert total.tolist() == [2.0, 2.0, 2.0]
