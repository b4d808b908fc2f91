"""On shm, an all-to-all moves views as they lie: the same elements as of contiguous copies."""

from __future__ import annotations

import random

import pytest
import torch

from ds_comm import all_to_all, differentiable, world_group
from ds_config.errors import CommError
from ds_ops.shm_collectives import rows_of
from ds_testing import world

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def numbered(shape: list[int], rank: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1000 * rank + sum(shape)))
    return made.to(dtype)


def view(whole: torch.Tensor, draws: random.Random) -> torch.Tensor:
    """The same elements with other strides: dims in another order in memory, and gaps."""
    order = draws.sample(range(whole.dim()), whole.dim())
    back = [order.index(dim) for dim in range(whole.dim())]
    gaps = [size + draws.choice((0, 0, 1, 3)) for size in whole.permute(order).shape]
    base = torch.zeros(gaps, dtype=whole.dtype)
    made = base[tuple(slice(0, size) for size in whole.permute(order).shape)].permute(back)
    return made.copy_(whole)


def check(cases: int) -> None:
    group = world_group()
    for case in range(cases):
        draws = random.Random(case)  # the same on all ranks
        dtype, dims = draws.choice(DTYPES), draws.randint(1, 4)
        most = draws.choice((4, 12, 40 if dims < 4 else 20))
        # shapes[a][b]: what rank a gives to rank b.
        shapes = [
            [[draws.randint(0 if draws.random() < 0.1 else 1, most) for _ in range(dims)] for _ in range(group.size)]
            for _ in range(group.size)
        ]
        private = random.Random(100 * case + group.rank)
        sent = [view(numbered(shape, group.rank, dtype), private) for shape in shapes[group.rank]]
        wanted = [numbered(shapes[r][group.rank], r, dtype) for r in range(group.size)]
        got = [view(torch.zeros_like(one), private) for one in wanted]
        work = all_to_all(got, sent, async_op=draws.random() < 0.5)
        del sent  # they are kept until they have been sent
        work.wait()
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)), case


@world(2, backend="shm")
def test_two_ranks() -> None:
    check(60)


@world(3, backend="shm")
def test_three_ranks() -> None:
    check(40)


@world(2, backend="shm")
def test_heads_of_a_long_sequence() -> None:
    """Several chunks, whose ends lie within rows, and there and back again."""
    group = world_group()
    x = torch.randn(1, 700, 6, 50, generator=torch.Generator().manual_seed(group.rank))
    heads = differentiable.seq_all_to_all(x, group, scatter_dim=2, gather_dim=1, scatter_sizes=(4, 2))
    theirs = torch.randn(1, 700, 6, 50, generator=torch.Generator().manual_seed(1 - group.rank))
    both = (x, theirs) if group.rank == 0 else (theirs, x)
    mine = slice(0, 4) if group.rank == 0 else slice(4, 6)
    assert torch.equal(heads, torch.cat([one[:, :, mine] for one in both], 1))
    back = differentiable.seq_all_to_all(heads, group, scatter_dim=1, gather_dim=2, gather_sizes=(4, 2))
    assert torch.equal(back, x)


@world(2, backend="shm")
def test_what_is_received_may_lie_where_something_was_sent() -> None:
    group = world_group()
    x = torch.arange(300_000.0) + 1000_000 * group.rank
    base = x.clone()
    all_to_all(list(base.chunk(2)), list(base.chunk(2)))
    expected = [torch.arange(300_000.0).chunk(2)[group.rank] + 1000_000 * r for r in range(2)]
    assert torch.equal(base, torch.cat(expected))


@world(2, backend="gloo")
def test_elsewhere_they_are_refused() -> None:
    x = torch.zeros(4, 4).t()
    with pytest.raises(CommError, match="not contiguous"):
        all_to_all(list(x.split(2)), list(torch.zeros(4, 4).split(2)))


@pytest.mark.parametrize(
    ("tensor", "lies"),
    [
        (torch.zeros(3, 4, 5), (60, 60)),
        (torch.zeros(3, 4, 5)[:, 1:3], (10, 20)),
        (torch.zeros(3, 4, 5)[:, :, :2], (2, 5)),
        (torch.zeros(3, 4, 5)[::2], (20, 40)),
        (torch.zeros(3, 4, 5)[:, ::2, :2], (2, 10)),
        (torch.zeros(3, 5, 5)[:, ::2, :2], None),
        (torch.zeros(4, 5).t(), None),
        (torch.zeros(4, 1).expand(4, 5), None),
        (torch.zeros(1, 4).expand(5, 4), None),
        (torch.zeros(()), (1, 1)),
        (torch.zeros(0, 3), (1, 1)),
    ],
)
def test_rows(tensor: torch.Tensor, lies: tuple[int, int] | None) -> None:
    assert rows_of(tensor) == lies
