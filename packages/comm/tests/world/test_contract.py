"""The contract of collectives: every one of them against its definition, computed on each rank from what all ranks pass.

    backend    gloo, shm, and no process group at all (a group of one)
    dtype      float32, bfloat16, float16, int64, bool
    ranks      1, 2, 3, 4
    elements   0, 1, odd, and more than one slot of shared memory holds

One world runs everything for its number of ranks: meeting costs more than the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm
from ds_comm import ReduceOp
from ds_comm.shm import shm_group
from ds_ops.shm_collectives import ChannelSettings
from ds_testing import world

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
SLOT_BYTES = 8 << 10
SIZES = [0, 1, 7, 9001]  # the last fills a slot also with booleans
BACKENDS = [
    "gloo",
    pytest.param(
        "shm", marks=pytest.mark.skipif(bool(shm_group.available()), reason=f"no shm: {shm_group.available()}")
    ),
]


@dataclass(frozen=True)
class Contract:
    """What one rank knows: everyone's input. `every[r]` has n elements, `wide[r]` n for each rank."""

    group: ds_comm.Group
    dtype: torch.dtype
    n: int
    every: list[Tensor]
    wide: list[Tensor]
    exact: bool

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def mine(self) -> Tensor:
        return self.every[self.rank].clone()

    @property
    def my_wide(self) -> Tensor:
        return self.wide[self.rank].clone()

    def empty(self, parts: int = 1) -> Tensor:
        return torch.empty(parts * self.n, dtype=self.dtype)

    def parts(self) -> list[Tensor]:
        return [self.empty() for _ in range(self.size)]

    def part(self, whole: Tensor, rank: int | None = None) -> Tensor:
        rank = self.rank if rank is None else rank
        return whole[rank * self.n : (rank + 1) * self.n]

    def to_me(self) -> list[Tensor]:
        """Everyone's part for this rank."""
        return [self.part(whole) for whole in self.wide]

    def split(self) -> list[Tensor]:
        return [self.part(self.my_wide, rank) for rank in range(self.size)]


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What `rank` contributes; fractions that do not add exactly, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 9, (n,), generator=generator).to(dtype)


def summed(terms: Sequence[Tensor], divisor: int = 1) -> Tensor:
    """The definition: in rank order, in fp32 for half types."""
    if terms[0].dtype == torch.bool:
        return torch.stack(list(terms)).any(0)
    wide = terms[0].float() if terms[0].dtype.itemsize == 2 else terms[0].clone()
    for term in terms[1:]:
        wide = wide + term
    return (wide / divisor if divisor > 1 else wide).to(terms[0].dtype)


def assert_sum(found: Tensor, terms: Sequence[Tensor], exact: bool) -> None:
    expected = summed(terms)
    if exact or not expected.dtype.is_floating_point:
        assert torch.equal(found, expected)
    else:  # torch's ring sums in an order of its own
        eps = torch.finfo(expected.dtype).eps
        bound = eps * torch.stack([term.abs().float() for term in terms]).sum(0) * len(terms)
        assert ((found.float() - expected.float()).abs() <= bound).all()


def check_reductions(c: Contract) -> None:
    for asynchronous in (False, True):
        x = c.mine
        ds_comm.all_reduce(x, group=c.group, async_op=asynchronous).wait()
        assert_sum(x, c.every, c.exact)
    ops = [(ReduceOp.MAX, torch.amax), (ReduceOp.MIN, torch.amin)]
    for op, define in ops if c.n else []:
        x = c.mine
        ds_comm.all_reduce(x, op, group=c.group)
        assert torch.equal(x, define(torch.stack(c.every), 0))
    if c.dtype == torch.int64:
        for op, fold in ((ReduceOp.BAND, torch.bitwise_and), (ReduceOp.BXOR, torch.bitwise_xor)):
            x, expected = c.mine, c.every[0]
            ds_comm.all_reduce(x, op, group=c.group)
            for other in c.every[1:]:
                expected = fold(expected, other)
            assert torch.equal(x, expected)
    if c.dtype.is_floating_point:
        x = c.mine
        ds_comm.all_reduce(x, ReduceOp.AVG, group=c.group)
        torch.testing.assert_close(x, summed(c.every, c.size), atol=1e-2, rtol=1e-2)
    for root in {0, c.size - 1}:
        x = c.mine
        ds_comm.reduce(x, group_dst=root, group=c.group)
        if c.rank == root:
            assert_sum(x, c.every, exact=True)
    out = c.empty()
    ds_comm.reduce_scatter_single(out, c.my_wide, group=c.group)
    assert_sum(out, c.to_me(), exact=True)
    out = c.empty()
    ds_comm.reduce_scatter(out, c.split(), group=c.group, async_op=True).wait()
    assert_sum(out, c.to_me(), exact=True)
    within = c.my_wide
    ds_comm.reduce_scatter_single(c.part(within), within, group=c.group)
    assert_sum(c.part(within), c.to_me(), exact=True)


def check_gathers(c: Contract) -> None:
    whole = torch.cat(c.every)
    for asynchronous in (False, True):
        out = c.empty(c.size)
        ds_comm.all_gather_single(out, c.mine, group=c.group, async_op=asynchronous).wait()
        assert torch.equal(out, whole)
    out = torch.zeros(c.n * c.size, dtype=c.dtype)
    c.part(out).copy_(c.mine)
    ds_comm.all_gather_single(out, c.part(out), group=c.group)
    assert torch.equal(out, whole)
    outs = c.parts()
    ds_comm.all_gather(outs, c.mine, group=c.group)
    assert torch.equal(torch.cat(outs), whole)


def check_exchanges(c: Contract) -> None:
    expected = torch.cat(c.to_me())
    for asynchronous in (False, True):
        out = c.empty(c.size)
        ds_comm.all_to_all_single(out, c.my_wide, group=c.group, async_op=asynchronous).wait()
        assert torch.equal(out, expected)
    outs = c.parts()
    ds_comm.all_to_all(outs, c.split(), group=c.group)
    assert torch.equal(torch.cat(outs), expected)
    # Several pieces of a rank's part, the last one empty.
    outs, sent = [c.empty() for _ in range(c.size)], c.split()
    cuts = [0, c.n // 3, c.n // 3, c.n]
    pieces = [[part[a:b] for a, b in pairwise(cuts)] for part in sent]
    into = [[part[a:b] for a, b in pairwise(cuts)] for part in outs]
    ds_comm.all_to_all_pieces(into, pieces, group=c.group)
    outs[c.rank].copy_(sent[c.rank])  # what is for oneself stays
    assert torch.equal(torch.cat(outs), expected)
    # Uneven: rank a gives rank b its first (a + b) % 3 rows.
    rows = [(c.rank + to) % 3 for to in range(c.size)]
    width = max(c.n // 7, 1)
    sent = values(c.rank, sum(rows) * width, c.dtype, salt=2).view(-1, width)
    out = torch.empty_like(sent)
    ds_comm.all_to_all_single(out, sent, rows, rows, group=c.group)
    others = [values(r, sum((r + to) % 3 for to in range(c.size)) * width, c.dtype, salt=2) for r in range(c.size)]
    starts = [sum((r + to) % 3 for to in range(c.rank)) * width for r in range(c.size)]
    parts = [other[at : at + rows[r] * width] for r, (other, at) in enumerate(zip(others, starts, strict=True))]
    assert torch.equal(out.view(-1), torch.cat(parts))


def check_rooted(c: Contract) -> None:
    for root in {0, c.size - 1}:
        x = c.mine
        ds_comm.broadcast(x, group_src=root, group=c.group)
        assert torch.equal(x, c.every[root])
        outs = c.parts() if c.rank == root else None
        ds_comm.gather(c.mine, outs, group_dst=root, group=c.group)
        assert outs is None or torch.equal(torch.cat(outs), torch.cat(c.every))
        out = c.empty()
        ds_comm.scatter(out, c.split() if c.rank == root else None, group_src=root, group=c.group)
        assert torch.equal(out, c.part(c.wide[root]))


def check_coalesced(c: Contract) -> None:
    lengths = (c.n, 0, 3)
    parts = [values(c.rank, n, c.dtype, salt=3) for n in lengths]
    terms = [[values(r, n, c.dtype, salt=3) for r in range(c.size)] for n in lengths]
    totals = [part.clone() for part in parts]
    ds_comm.all_reduce_coalesced(totals, group=c.group)
    rows = [torch.empty(c.size, n, dtype=c.dtype) for n in lengths]
    ds_comm.all_gather_coalesced(rows, parts, group=c.group)
    back = [torch.empty_like(part) for part in parts]
    ds_comm.reduce_scatter_coalesced(back, rows, group=c.group, async_op=True).wait()
    for total, row, mine, each in zip(totals, rows, back, terms, strict=True):
        assert_sum(total, each, c.exact)
        assert torch.equal(row, torch.stack(each))
        assert_sum(mine, [each[c.rank]] * c.size, exact=True)


def check_messages(c: Contract) -> None:
    if c.size == 1:
        return
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    out, direct = c.empty(), c.empty()
    ops = [
        ds_comm.P2POp(ds_comm.isend, c.mine, group=c.group, group_peer=right),
        ds_comm.P2POp(ds_comm.irecv, out, group=c.group, group_peer=left),
    ]
    for work in ds_comm.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(out, c.every[left])
    if c.rank == 0:
        ds_comm.send(c.mine, group_dst=c.size - 1, group=c.group, tag=5)
    if c.rank == c.size - 1:
        ds_comm.recv(direct, group_src=0, group=c.group, tag=5)
        assert torch.equal(direct, c.every[0])


CHECKS: list[Callable[[Contract], None]] = [
    check_reductions,
    check_gathers,
    check_exchanges,
    check_rooted,
    check_coalesced,
    check_messages,
]


def check_objects(group: ds_comm.Group) -> None:
    told: list[object] = [None] * group.size
    ds_comm.all_gather_object(told, "x" * group.rank, group)
    assert told == ["x" * r for r in range(group.size)]
    shared: list[object] = [{"from": group.rank}, "long" * (3000 if group.rank == 0 else 1)]
    ds_comm.broadcast_object_list(shared, group_src=0, group=group)
    assert shared == [{"from": 0}, "long" * 3000]
    at_last: list[object] | None = [None] * group.size if group.rank == group.size - 1 else None
    ds_comm.gather_object(group.rank * 10, at_last, group_dst=group.size - 1, group=group)
    assert at_last is None or at_last == [10 * r for r in range(group.size)]
    mine: list[object] = [None]
    ds_comm.scatter_object_list(mine, [[r] for r in range(group.size)] if group.rank == 0 else None, group=group)
    assert mine == [[group.rank]]
    ds_comm.barrier(group)
    ds_comm.barrier(group, async_op=True).wait()
    ds_comm.monitored_barrier(group)


def check_all(group: ds_comm.Group, sizes: Sequence[int], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    on_shm = group.pg is not None and "shm" in dist.get_backend(group.pg)
    exact = group.size <= 2 or on_shm
    for dtype in dtypes:
        for n in sizes:
            every = [values(r, n, dtype) for r in range(group.size)]
            wide = [values(r, n * group.size, dtype, salt=1) for r in range(group.size)]
            contract = Contract(group, dtype, n, every, wide, exact)
            for check in CHECKS:
                try:
                    check(contract)
                except AssertionError as error:
                    raise AssertionError(f"{check.__name__} of {n} x {dtype} over {group.size} ranks") from error
    check_objects(group)


def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_group, "SETTINGS", ChannelSettings(SLOT_BYTES, 4 << 10))


def test_a_group_of_one_needs_no_process_group() -> None:
    check_all(ds_comm.self_group(), SIZES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@world(4, backend=None)
def test_every_collective_is_its_definition(ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slots(monkeypatch)
    meet(backend)
    if ranks < 4:
        pg = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            check_all(ds_comm.as_group(pg), SIZES)
    else:
        check_all(ds_comm.world_group(), SIZES)
    dist.barrier()
    ds_comm.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
@world(2, backend=None)
def test_messages_larger_than_what_is_moved_at_once(backend: str) -> None:
    meet(backend)
    check_all(ds_comm.world_group(), [700_001], [torch.float32])
    dist.barrier()
    ds_comm.destroy_process_group()


def meet(backend: str) -> None:
    dist.init_process_group(backend, init_method="env://")
