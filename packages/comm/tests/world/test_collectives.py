"""Every collective against its definition, computed on each rank from what all ranks would pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import ReduceOp, shm
from ds_testing import world

BACKENDS = [
    "gloo",
    pytest.param("shm", marks=pytest.mark.skipif(bool(shm.available()), reason=f"no shm: {shm.available()}")),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
SIZES = [0, 1, 7, 40_000]


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes; fractions that do not add exactly, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 9, (n,), generator=generator).to(dtype)


def sum_in_rank_order(terms: list[torch.Tensor]) -> torch.Tensor:
    if terms[0].dtype == torch.bool:
        return torch.stack(terms).any(0)
    wide = terms[0].float() if terms[0].dtype.itemsize == 2 else terms[0].clone()
    for term in terms[1:]:
        wide = wide + term
    return wide.to(terms[0].dtype)


def assert_sum(found: torch.Tensor, terms: list[torch.Tensor], exact: bool) -> None:
    expected = sum_in_rank_order(terms)
    if exact or not expected.dtype.is_floating_point:
        assert torch.equal(found, expected)
    else:
        eps = torch.finfo(expected.dtype).eps
        bound = eps * torch.stack([term.abs().float() for term in terms]).sum(0) * len(terms)
        assert ((found.float() - expected.float()).abs() <= bound).all()


def check_everything(group: ds_comm.Group, dtype: torch.dtype, n: int) -> None:
    rank, size = group.rank, group.size
    exact = size == 2 or "shm" in dist.get_backend(group.pg)  # on gloo, torch sums large tensors in its own order
    every = [values(r, n, dtype) for r in range(size)]
    wide = [values(r, n * size, dtype, salt=1) for r in range(size)]
    mine, my_wide = every[rank], wide[rank]
    part = slice(rank * n, (rank + 1) * n)

    x = mine.clone()
    ds_comm.all_reduce(x, group=group)
    assert_sum(x, every, exact)
    x = mine.clone()
    ds_comm.all_reduce(x, ReduceOp.MAX, group=group)
    assert torch.equal(x, torch.stack(every).amax(0) if n else x)
    x = mine.clone()
    ds_comm.reduce(x, size - 1, group=group)
    if rank == size - 1:
        assert_sum(x, every, exact=True)
    if dtype.is_floating_point:
        x = mine.clone()
        ds_comm.all_reduce(x, ReduceOp.AVG, group=group)
        torch.testing.assert_close(x, (torch.stack(every).float().sum(0) / size).to(dtype), atol=1e-2, rtol=1e-2)

    out = torch.empty(n, dtype=dtype)
    ds_comm.reduce_scatter_single(out, my_wide.clone(), group=group)
    assert_sum(out, [w[part] for w in wide], exact=True)
    out = torch.empty(n, dtype=dtype)
    ds_comm.reduce_scatter(out, list(my_wide.clone().split(n) if n else [my_wide] * size), group=group)
    assert_sum(out, [w[part] for w in wide], exact=True)
    within = my_wide.clone()
    ds_comm.reduce_scatter_single(within[part], within, group=group)
    assert_sum(within[part], [w[part] for w in wide], exact=True)

    out = torch.empty(n * size, dtype=dtype)
    ds_comm.all_gather_single(out, mine, group=group)
    assert torch.equal(out, torch.cat(every))
    out = torch.zeros(n * size, dtype=dtype)
    out[part] = mine
    ds_comm.all_gather_single(out, out[part], group=group)
    assert torch.equal(out, torch.cat(every))
    outs = [torch.empty(n, dtype=dtype) for _ in range(size)]
    ds_comm.all_gather(outs, mine, group=group)
    assert torch.equal(torch.cat(outs), torch.cat(every))

    out = torch.empty(n * size, dtype=dtype)
    ds_comm.all_to_all_single(out, my_wide, group=group)
    assert torch.equal(out, torch.cat([w[part] for w in wide]))

    for root in {0, size - 1}:
        x = mine.clone()
        ds_comm.broadcast(x, root, group=group)
        assert torch.equal(x, every[root])
        outs = [torch.empty(n, dtype=dtype) for _ in range(size)] if rank == root else None
        ds_comm.gather(mine, outs, root, group=group)
        assert outs is None or torch.equal(torch.cat(outs), torch.cat(every))
        out = torch.empty(n, dtype=dtype)
        ds_comm.scatter(
            out, list(my_wide.split(n) if n else [my_wide] * size) if rank == root else None, root, group=group
        )
        assert torch.equal(out, wide[root][part])
    ds_comm.barrier(group)


def of_backend(backend: str) -> ds_comm.Group:
    pg = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    return ds_comm.as_group(pg)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@world(2)
def test_two_ranks(dtype: torch.dtype, backend: str) -> None:
    group = of_backend(backend)
    for n in SIZES:
        check_everything(group, dtype, n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [3, 4])
@world(4)
def test_more_ranks(ranks: int, backend: str) -> None:
    world = of_backend(backend)
    pg = world.pg if ranks == world.size else dist.new_group(list(range(ranks)), backend=backend)
    if dist.get_rank() < ranks:
        group = ds_comm.as_group(pg)
        for dtype in DTYPES:
            for n in SIZES[:3]:
                check_everything(group, dtype, n)
        check_everything(group, torch.bfloat16, SIZES[3])


@pytest.mark.parametrize("backend", BACKENDS)
@world(2)
def test_messages_larger_than_what_is_moved_at_once(backend: str) -> None:
    check_everything(of_backend(backend), torch.float32, 700_001)


@world(2)
def test_dtypes_gloo_does_not_know_move_too() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64):
        mine, out = torch.full((3,), rank + 1).to(dtype), torch.zeros(6).to(dtype)
        ds_comm.all_gather_single(out, mine)
        ds_comm.broadcast(mine, 1)
        assert out.to(torch.complex64).tolist() == [1, 1, 1, 2, 2, 2]
        assert mine.to(torch.complex64).tolist() == [2, 2, 2]


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
def test_coalesced_forms_equal_one_by_one() -> None:
    rank = dist.get_rank()
    parts = [values(rank, n, torch.float32, salt=n) for n in (3, 0, 5)]
    summed = [part.clone() for part in parts]
    ds_comm.all_reduce_coalesced(summed)
    gathered = [torch.empty(2, part.numel()) for part in parts]
    ds_comm.all_gather_coalesced(gathered, parts)
    scattered = [torch.empty(part.numel()) for part in parts]
    ds_comm.reduce_scatter_coalesced(scattered, gathered)
    for part, total, rows, mine in zip(parts, summed, gathered, scattered, strict=True):
        expected, row = part.clone(), torch.empty(2, part.numel())
        ds_comm.all_reduce(expected)
        ds_comm.all_gather_single(row, part)
        assert torch.equal(total, expected)
        assert torch.equal(rows, row)
        assert torch.equal(mine, 2 * row[rank])


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


@world(3)
def test_objects() -> None:
    rank = dist.get_rank()
    gathered = [None] * 3
    ds_comm.all_gather_object(gathered, "x" * rank)
    assert gathered == ["", "x", "xx"]
    shared = [{"from": 1}, "long" * 100] if rank == 1 else [None, None]
    ds_comm.broadcast_object_list(shared, 1)
    assert shared == [{"from": 1}, "long" * 100]
    at_two = [None] * 3 if rank == 2 else None
    ds_comm.gather_object(rank * 10, at_two, 2)
    assert at_two is None or at_two == [0, 10, 20]
    mine = [None]
    ds_comm.scatter_object_list(mine, ["a", "bb", [3]] if rank == 0 else None)
    assert mine[0] == ["a", "bb", [3]][rank]


@world(2)
def test_raw_process_groups_and_none_are_groups() -> None:
    pair = ds_comm.new_group([1, 0], "pair")
    assert pair is not None
    assert pair.pg is dist.group.WORLD
    for group in (None, dist.group.WORLD, pair):
        x = torch.ones(1)
        ds_comm.all_reduce(x, group=group)
        assert x.item() == 2
    assert ds_comm.as_group(None).channel is pair.channel


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
    assert span.attrs == {"unit": "layers.0", "group": "world", "ranks": 2, "nbytes": 16, "dtype": "float32"}
