"""Each function equals single-process autograd over the inputs of all ranks: values, gradients, gradients of gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_comm
from ds_comm import differentiable as d
from ds_config.errors import CommError
from ds_testing import world

Run = Callable[[Tensor, int, bool], Tensor]  # this rank's x, its rank, whether asynchronous
Truth = Callable[[Sequence[Tensor]], list[Tensor]]  # every rank's x (or the common one) -> every rank's result


@dataclass(frozen=True)
class Case:
    """One function on one layout. `own_in`, `own_out`: whether ranks have tensors of their own, or all the same."""

    name: str
    shapes: Sequence[tuple[int, ...]]
    run: Run
    truth: Truth
    own_in: bool = True
    own_out: bool = True
    asynchronous: bool = True


def waited(result: Tensor | d.InFlight) -> Tensor:
    return result.wait() if isinstance(result, d.InFlight) else result


def cut(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    return x.split(list(sizes), dim)


def cases(size: int) -> list[Case]:
    ranks = range(size)
    uneven = [(r * 2 + 1) % 4 for r in ranks]  # 1, 3, 1, 3
    holes = [0 if r == 0 else r + 1 for r in ranks]
    table = [[(a * size + b) % 3 for b in ranks] for a in ranks]  # rows from a to b; zeros among them

    def rows(name: str, table: list[list[int]], rest: tuple[int, ...]) -> Case:
        return Case(
            name,
            [(sum(table[r]), *rest) for r in ranks],
            lambda x, r, a: waited(
                d.all_to_all_rows(x, None, table[r], [table[s][r] for s in ranks], async_op=a, unit="rows")
            ),
            lambda xs: [torch.cat([cut(xs[s], table[s], 0)[r] for s in ranks]) for r in ranks],
        )

    def swap(
        name: str, shape: tuple[int, ...], scatter: tuple[int, list[int] | None], gather: tuple[int, list[int] | None]
    ) -> Case:
        (cut_dim, scattered), (put_dim, gathered) = scatter, gather
        parts = scattered or [shape[cut_dim] // size] * size
        shapes = [tuple(gathered[r] if gathered and i == put_dim else n for i, n in enumerate(shape)) for r in ranks]
        return Case(
            name,
            shapes,
            lambda x, r, a: waited(
                d.seq_all_to_all(
                    x,
                    None,
                    scatter_dim=cut_dim,
                    gather_dim=put_dim - len(shape),  # counted from the end as well
                    scatter_sizes=scattered,
                    gather_sizes=gathered,
                    async_op=a,
                )
            ),
            lambda xs: [torch.cat([cut(x, parts, cut_dim)[r] for x in xs], put_dim) for r in ranks],
        )

    def along(dim: int, sizes: list[int]) -> list[Case]:
        parts = [(2, n, 3) if dim == 1 else (n, 3) for n in sizes]
        whole = (2, sum(sizes), 3) if dim == 1 else (sum(sizes), 3)
        given = None if len(set(sizes)) == 1 else sizes
        end = f"{dim} {sizes}"
        return [
            Case(
                f"all_gather {end}",
                parts,
                lambda x, r, a: waited(d.all_gather(x, None, dim, given, async_op=a)),
                lambda xs: [torch.cat(list(xs), dim)] * size,
            ),
            Case(
                f"gather {end}",
                parts,
                lambda x, r, a: waited(d.gather(x, None, dim, given, async_op=a)),
                lambda xs: [torch.cat(list(xs), dim)],
                own_out=False,
            ),
            Case(
                f"reduce_scatter {end}",
                [whole] * size,
                lambda x, r, a: waited(d.reduce_scatter(x, None, dim, given, async_op=a)),
                lambda xs: list(cut(torch.stack(list(xs)).sum(0), sizes, dim)),
            ),
            Case(
                f"split {end}",
                [whole],
                lambda x, r, a: d.split(x, None, dim, given),
                lambda xs: list(cut(xs[0], sizes, dim)),
                own_in=False,
                asynchronous=False,
            ),
        ]

    return [
        rows("rows with zeros", table, (2,)),
        rows("nothing at all", [[0] * size for _ in ranks], (2,)),
        rows("all to the last", [[0] * (size - 1) + [2] for _ in ranks], ()),
        swap("heads for sequence", (2, 3, 2 * size, 2), (2, None), (1, None)),
        swap("sequence for heads", (2, 2 * size, 3, 2), (1, None), (2, None)),
        swap("outermost", (2 * size, 3), (0, None), (1, None)),
        swap("to the outermost", (3, 2 * size), (1, None), (0, None)),
        swap("uneven", (3, sum(uneven)), (1, uneven), (0, holes)),
        *along(0, [2] * size),
        *along(1, [2] * size),
        *along(0, uneven),
        *along(1, holes),
        Case(
            "copy",
            [(3, 2)],
            lambda x, r, a: d.copy_with_late_sum(x, None) if a else d.copy(x, None),
            lambda xs: [xs[0]] * size,
            own_in=False,
        ),
        Case(
            "reduce",
            [(3, 2)] * size,
            lambda x, r, a: waited(d.reduce(x, None, async_op=a)),
            lambda xs: [torch.stack(list(xs)).sum(0)],
            own_out=False,
        ),
    ]


def drawn(shape: Sequence[int], salt: int, strided: bool = False) -> Tensor:
    """The same on every rank; not contiguous where asked and possible."""
    made = torch.randn(tuple(shape)[::-1] if strided else tuple(shape), generator=torch.Generator().manual_seed(salt))
    return (made.permute(*range(made.dim() - 1, -1, -1)) if strided else made).double()


def second_order(out: Tensor, x: Tensor, weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradient of a cubic loss of `out`, and that of a square of it."""
    (first,) = torch.autograd.grad((weights[0] * out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((weights[1] * first**2).sum(), x)
    return [first.detach(), second]


def truth_of(
    case: Case, xs: list[Tensor], outs: list[Tensor], size: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in xs]
    found = case.truth(leaves)
    loss = torch.stack([(w * out**3).sum() for w, out in zip(outs, found, strict=True)]).sum()
    firsts = torch.autograd.grad(loss, leaves, create_graph=True)
    squares = torch.stack([(drawn(g.shape, 300 + i) * g**2).sum() for i, g in enumerate(firsts)]).sum()
    return [f.detach() for f in found], [f.detach() for f in firsts], list(torch.autograd.grad(squares, leaves))


def check(strided: bool, asynchronous: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in cases(size):
        if asynchronous and not case.asynchronous:
            continue
        xs = [drawn(shape, 10 + i, strided) for i, shape in enumerate(case.shapes)]
        shapes = [out.shape for out in case.truth(xs)]
        weights = [drawn(shape, 200 + i) for i, shape in enumerate(shapes)]
        values, firsts, seconds = truth_of(case, xs, weights, size)
        mine, theirs = rank if case.own_in else 0, rank if case.own_out else 0
        x = xs[mine].requires_grad_()
        out = case.run(x, rank, asynchronous)
        torch.testing.assert_close(out, values[theirs], msg=lambda m, c=case: f"{c.name}: {m}")
        assert out.is_contiguous() or case.name == "copy", case.name
        first, second = second_order(out, x, (weights[theirs], drawn(xs[mine].shape, 300 + mine)))
        torch.testing.assert_close(first, firsts[mine], msg=lambda m, c=case: f"gradient of {c.name}: {m}")
        torch.testing.assert_close(second, seconds[mine], msg=lambda m, c=case: f"second gradient of {c.name}: {m}")


@world(2)
def test_a_copy_waits_for_its_sum_in_a_node_of_its_own() -> None:
    x = torch.ones(3, requires_grad=True)
    version = x._version
    out = d.copy_with_late_sum(x * 1, None)
    start = out.grad_fn
    assert start is not None
    wait = start.next_functions[0][0]
    assert d.region_edge(start, ds_comm.world_group()) == d.region_edge(wait, ds_comm.world_group()) == "enters"
    (out * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert x._version == version


@world(2)
def test_a_move_that_nobody_needs_keeps_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    coming = d.reduce(x * 2, None, async_op=True)
    node = weakref.ref(coming._result.grad_fn)
    coming.abandon(timedelta(seconds=5))
    coming.abandon(timedelta(seconds=5))
    assert coming.is_completed()
    del coming
    gc.collect()
    assert node() is None


def check_all() -> None:
    for strided in (False, True):
        for asynchronous in (False, True):
            check(strided, asynchronous)


@world(2)
def test_two_ranks_on_gloo() -> None:
    check_all()


@world(4)
def test_four_ranks_on_gloo() -> None:
    check_all()


@world(2, backend="shm")
def test_two_ranks_on_shm() -> None:
    check_all()


@world(4, backend="shm")
def test_four_ranks_on_shm() -> None:
    check_all()


@world(2)
def test_gradients_are_finite_differences() -> None:
    """A gradcheck over ranks: a step in one element of one rank's input moves the sum of all ranks' losses as told."""
    rank, size, step = dist.get_rank(), dist.get_world_size(), 1e-6
    for case in cases(size):
        xs = [drawn(shape, 20 + i) for i, shape in enumerate(case.shapes)]
        weights = [drawn(out.shape, 30 + i) for i, out in enumerate(case.truth(xs))]
        mine = xs[rank if case.own_in else 0].requires_grad_()

        def loss(x: Tensor, case: Case = case, weights: list[Tensor] = weights) -> Tensor:
            return (weights[rank if case.own_out else 0] * case.run(x, rank, False).sin()).sum()

        (told,) = torch.autograd.grad(loss(mine), mine)
        for owner in range(len(xs)):
            for place in range(xs[owner].numel()):
                moved = torch.zeros(mine.numel(), dtype=torch.float64)
                if not case.own_in or owner == rank:
                    moved[place] = step
                ends = [loss(mine.detach() + sign * moved.view(mine.shape)).detach() for sign in (1, -1)]
                change = (ends[0] - ends[1]) / (2 * step)
                if case.own_out:  # a common loss is everyone's already
                    ds_comm.all_reduce(change)
                if not case.own_in or owner == rank:
                    assert abs(change - told.view(-1)[place]) < 1e-7, (case.name, owner, place)


@world(2)
def test_what_lies_between_the_wait_and_the_call_overlaps() -> None:
    """The gradient starts at `wait` and is waited for at the call: what the graph has between runs meanwhile."""
    order: list[str] = []
    x = torch.ones(4, 2, requires_grad=True)
    coming = d.all_to_all_rows(x * 1, None, [2, 2], [2, 2], async_op=True)
    between = torch.ones(2, requires_grad=True) * 2
    between.register_hook(lambda g: order.append("between"))
    out = coming.wait()
    assert coming.wait() is out
    assert coming.is_completed()
    departed = out.grad_fn.next_functions[0][0]
    out.grad_fn.register_prehook(lambda g: order.append("arrive"))
    departed.register_hook(lambda new, old: order.append("depart"))
    (out.sum() + between.sum()).backward()
    assert order == ["arrive", "between", "depart"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 2))


@world(2)
def test_a_result_can_be_changed_in_place_and_used_twice() -> None:
    for asynchronous in (False, True):
        x = torch.ones(2, 3, requires_grad=True)
        out = waited(d.all_gather(x * 2, None, async_op=asynchronous))
        out.mul_(3)
        (out.sum() + (out**2).sum()).backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.full((2, 3), 2.0 * (6 + 2 * 6 * 6)))


@world(2)
def test_anomaly_detection_reads_nothing_unfinished() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        waited(d.all_to_all_rows(x, None, [1, 1], [1, 1], async_op=True)).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(1).all()


def test_a_group_of_one_is_the_identity() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert d.seq_all_to_all(x, None, scatter_dim=0, gather_dim=1) is x
    assert d.all_to_all_rows(x, None, [4], [4], async_op=True).wait() is x
    for run in (d.copy, d.reduce, d.all_gather, d.reduce_scatter):
        assert run(x, None) is x
    assert d.gather(x, None, 1) is x
    assert d.split(x, None, 1) is x


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda x: d.seq_all_to_all(x, None, scatter_dim=0, gather_dim=-2), "dim 0 is to be scattered and gathered"),
        (lambda x: d.all_gather(x, None, 2), "dim 2 of a tensor of shape (4, 6)"),
        (lambda x: d.all_gather(x, None, 0, [3]), "dim 0 has 4 places on rank 0 of the group, the sizes are [3]"),
        (lambda x: d.all_to_all_rows(x, None, [3], [3]), "x dim 0 has 4 places, its sizes are [3]"),
        (lambda x: d.reduce_scatter(x, None, 0, [5, -1]), "dim 0 has 4 places, its sizes are [5, -1]"),
    ],
)
def test_sizes_that_do_not_fit_are_told(run: Callable[[Tensor], object], found: str) -> None:
    with pytest.raises(CommError) as caught:
        run(torch.zeros(4, 6))
    assert found in str(caught.value)
