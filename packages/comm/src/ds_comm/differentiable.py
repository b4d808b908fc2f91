"""Collectives that autograd knows: each with its gradient, which is a collective again.

    y = differentiable.all_to_all_rows(x, group, send, receive)
    coming = differentiable.exchange(q, group, scatter_dim=2, gather_dim=1, async_op=True)
    ...                                                # computes meanwhile
    q = coming.wait()                                  # in the graph

Words: a tensor is *one's own* where each rank has another, and *common* where all ranks have the same. What a function's
gradient is follows from which of the two it makes of which:

    all_to_all_rows, exchange   own -> own         the reverse exchange
    all_gather                  own -> own use     reduce_scatter: each rank used all of it in its own way
    reduce_scatter              own -> own         all_gather
    copy                        common -> own use  all-reduce of the gradients (Megatron's f: Shoeybi et al. 2019, section 3)
    reduce                      own -> common      the gradient as it is (Megatron's g)
    gather                      own -> common      own part of the gradient
    split                       common -> own      the gradients, gathered

Gradients can be differentiated again. The ranks of a group make the same calls in the same order, and use every result or
none: autograd calls the gradients in the reverse order of the calls, on each rank whose loss depends on them.

A group of one returns what it was given. Tensors are of any layout and device that the group communicates; results are
contiguous. With `async_op` a function returns an `InFlight`; its gradient overlaps as well, with what the backward does
between `wait` and the call. Costs are bytes sent per rank for N ranks, a result of S bytes, and the same for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ds_comm.call import CollectiveCall
from ds_comm.differentiable_ops import (
    AllGather,
    CollectiveOp,
    Copy,
    DimSizes,
    Reduce,
    ReduceScatter,
    RowMove,
    SequenceAllToAll,
    SplitForward,
)
from ds_comm.groups import GroupLike, as_group
from ds_comm.work import DONE

__all__ = [
    "InFlight",
    "all_gather",
    "all_to_all_rows",
    "copy",
    "copy_with_late_sum",
    "gather",
    "reduce",
    "reduce_scatter",
    "region_edge",
    "seq_all_to_all",
    "split",
]


def all_to_all_rows(
    x: Tensor,
    group: GroupLike,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    """Send rows of `x` to the ranks and return theirs, both in rank order.

    Args:
        x: [sum of send, ...].
        send: Rows that go to each rank; may be 0.
        receive: Rows that come from each rank: that rank's `send` for this one (`all_to_all_counts` tells them).
    Returns:
        [sum of receive, ...].
    Raises:
        CommError: the sizes are not one per rank or do not sum to the rows ("comm-size").
    Cost: the rows for other ranks, from where they lie.
    """
    call = CollectiveCall("all_to_all_single", as_group(group), unit)
    send, receive = tuple(call.cut("x dim 0", x.shape[0], send)), tuple(receive)
    call.cut("the result", sum(receive), receive)
    return _run(RowMove(call, send, receive), x, async_op)


def seq_all_to_all(
    x: Tensor,
    group: GroupLike,
    *,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    """Cut one dim over the ranks and put another together: Ulysses' change from [s/N, heads] to [s, heads/N] and back.

    Args:
        x: Cut along `scatter_dim`, part r goes to rank r.
        scatter_sizes: Places of `scatter_dim` for each rank; equal parts when None.
        gather_sizes: Places of `gather_dim` that each rank has; as many as here when None.
    Returns:
        `x`'s shape with scatter_sizes[rank] places in `scatter_dim` and the sum of gather_sizes in `gather_dim`.
    Raises:
        CommError: the sizes do not fit, or both dims are one ("comm-size").
    Cost: (N-1)/N S. One copy before, none where `scatter_dim` is the outermost; as much after for `gather_dim`.
    """
    call = CollectiveCall("all_to_all_single", as_group(group), unit)
    cut, put = _dim(call, x, scatter_dim), _dim(call, x, gather_dim)
    if cut == put:
        raise call.size_error(f"dim {cut} is to be scattered and gathered")
    scattered = call.cut(f"dim {cut}", x.shape[cut], scatter_sizes)
    gathered = _everyones(call, f"dim {put}", x.shape[put], gather_sizes)
    return _run(SequenceAllToAll(call, (cut, tuple(scattered)), (put, tuple(gathered))), x, async_op)


def all_gather(
    x: Tensor,
    group: GroupLike,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    """Gather every rank's `x` along `dim`, for results that each rank uses differently.

    Args:
        sizes: Entries of `dim` that each rank has; as many as on this rank when None. Uneven sizes are padded for
            transfer.
    Returns:
        `x`'s shape with the sum of sizes in `dim`. Its gradients are summed over the ranks (reduce-scatter).
    Cost: (N-1)/N S, and a copy where `dim` is not the outermost.
    """
    call = CollectiveCall("all_gather_single", as_group(group), unit)
    dim = _dim(call, x, dim)
    cut = DimSizes(dim, tuple(_everyones(call, f"dim {dim}", x.shape[dim], sizes)))
    return _run(AllGather(call, cut, common=False), x, async_op)


def reduce_scatter(
    x: Tensor,
    group: GroupLike,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    """Sum every rank's `x` and return this rank's part of the sum along `dim`.

    Args:
        sizes: Entries of `dim` for each rank; equal parts when None. Uneven sizes are padded for transfer.
    Returns:
        `x`'s shape with sizes[rank] in `dim`.
    Cost: (N-1)/N of x's bytes, and a copy where `dim` is not the outermost.
    """
    call = CollectiveCall("reduce_scatter_single", as_group(group), unit)
    dim = _dim(call, x, dim)
    return _run(ReduceScatter(call, DimSizes(dim, tuple(call.cut(f"dim {dim}", x.shape[dim], sizes)))), x, async_op)


def copy(x: Tensor, group: GroupLike, *, unit: str = "") -> Tensor:
    """Copy a replicated `x` to the group's region; sum its gradients over the group (Megatron's f).

    Column shards of a layer read the result.
    """
    return cast(Tensor, _run(Copy(CollectiveCall("all_reduce", as_group(group), unit)), x, False))


def copy_with_late_sum(x: Tensor, group: GroupLike, *, unit: str = "") -> Tensor:
    """Copy as `copy`, with two nodes in the graph: one starts the sum of the gradient, the one before it waits.

    What backward computes between both overlaps with the sum.
    """
    call = CollectiveCall("all_reduce", as_group(group), unit)
    return cast(InFlight, _run(Copy(call), x, True, moves_nothing=True)).wait()


def reduce(x: Tensor, group: GroupLike, *, async_op: bool = False, unit: str = "") -> Any:
    """Sum every rank's `x` into a result that all ranks share, for row shards of a layer; `x` does not change.

    Cost: 2 (N-1)/N S; its gradient costs nothing.
    """
    return _run(Reduce(CollectiveCall("all_reduce", as_group(group), unit)), x, async_op)


def gather(
    x: Tensor,
    group: GroupLike,
    dim: int,
    sizes: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    unit: str = "",
) -> Any:
    """Gather every rank's `x` along `dim`, for a result that all ranks use identically; else use `all_gather`.

    Args, returns and cost: as `all_gather`; its gradient costs nothing.
    """
    call = CollectiveCall("all_gather_single", as_group(group), unit)
    dim = _dim(call, x, dim)
    cut = DimSizes(dim, tuple(_everyones(call, f"dim {dim}", x.shape[dim], sizes)))
    return _run(AllGather(call, cut, common=True), x, async_op)


def split(x: Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None = None, *, unit: str = "") -> Tensor:
    """Return this rank's part along `dim` of a replicated `x`; all-gather its gradients.

    Args:
        sizes: Entries of `dim` for each rank; equal parts when None.
    Cost: a copy of the part. Its gradient is a `gather`.
    """
    call = CollectiveCall("all_gather_single", as_group(group), unit)
    dim = _dim(call, x, dim)
    cut = DimSizes(dim, tuple(call.cut(f"dim {dim}", x.shape[dim], sizes)))
    return cast(Tensor, _run(SplitForward(call, cut), x, False))


def region_edge(node: Node, group: GroupLike) -> Literal["enters", "leaves"] | None:
    """Return how a node of autograd's graph bounds a region where ranks of `group` compute with parts; None where it does not.

    "enters": its gradient is summed or gathered over the group (`copy`, `split`, `all_gather`, `reduce_scatter`). "leaves": its result is
    common (`reduce`, `gather`).
    """
    journey = getattr(node, "journey", None)
    if not isinstance(journey, _Journey) or journey.move.call.group.ranks != as_group(group).ranks:
        return None
    move = journey.move
    if isinstance(move, Reduce) or (isinstance(move, AllGather) and move.common):
        return "leaves"
    return "enters" if isinstance(move, Copy | SplitForward | AllGather | ReduceScatter) else None


class InFlight:
    """A result on its way."""

    __slots__ = ("_journey", "_result")

    def __init__(self, result: Tensor, journey: _Journey | None) -> None:
        """Hold `result` of the operation that `journey` waits for; None where `result` is ready."""
        self._result, self._journey = result, journey

    def wait(self) -> Tensor:
        """Wait for the operation and return its result, in the autograd graph.

        Every call returns the same tensor.
        """
        journey, self._journey = self._journey, None
        if journey is not None:
            self._result = _Arrive.apply(self._result, journey)
        return self._result

    def abandon(self, timeout: timedelta) -> None:
        """Wait at most `timeout` for an operation whose result nobody will use, and let go of its memory.

        An operation that nobody waits for keeps its tensors and their graph.

        Raises:
            CommError: as `Work.wait`.
        """
        journey, self._journey = self._journey, None
        if journey is None:
            return
        try:
            journey.work.wait(timeout)
        finally:
            journey.work, journey.finish, journey.keep = DONE, None, None

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""
        return self._journey is None or self._journey.work.is_completed()


# ---- what moves: pure descriptions, each of which knows its reverse


# ---- how a move enters the graph
#
# A move that is waited for at once is one node. One that is not is two: Depart starts it, Arrive waits. Backward runs them in
# reverse: the gradient of Arrive starts the reverse move and that of Depart waits for it, so what the graph has between
# the two overlaps. What has started cannot travel from one to the other as a gradient, whose shape autograd checks: it
# goes through the journey. As those gradients are made of the same two functions, they have gradients, too.


class _Journey:
    """One execution of a move. `back`: its gradient on the way, between the gradients of Arrive and Depart."""

    __slots__ = ("async_op", "back", "finish", "is_copy", "keep", "move", "work")

    def __init__(self, move: CollectiveOp, async_op: bool, moves_nothing: bool = False) -> None:
        self.move, self.is_copy = move, isinstance(move, Copy)
        self.async_op = async_op and (moves_nothing or not isinstance(move, Copy | SplitForward))
        self.work, self.finish = DONE, cast(Callable[[], object] | None, None)
        self.keep: Tensor | None = None
        self.back: InFlight | None = None

    def depart(self, x: Tensor) -> Tensor:
        launched = self.move.launch(x, self.async_op)
        self.work, self.finish = launched.work, launched.finish
        if self.async_op:
            self.keep = x  # what is on its way must not be freed, nor its memory used again
        else:
            self.arrive()
        return launched.out

    def arrive(self) -> None:
        self.work.wait()
        if self.finish is not None:
            self.finish()
        self.work, self.finish, self.keep = DONE, None, None


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.depart(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), journey = grads, ctx.journey
        if not journey.async_op:
            return _run(journey.move.reverse(), grad, False), None
        back, journey.back = journey.back, None
        return back.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.arrive()
        if journey.is_copy:  # of which nothing was written: it is its input
            return started.view_as(started)
        ctx.mark_dirty(started)
        return started

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.journey.back = _run(ctx.journey.move.reverse(), grads[0], True)
        return grads[0], None


def _run(move: CollectiveOp, x: Tensor, async_op: bool, *, moves_nothing: bool = False) -> Any:
    if move.call.group.size == 1:
        return InFlight(x, None) if async_op else x
    journey = _Journey(move, async_op, moves_nothing)
    result = _Depart.apply(x, journey)
    if not async_op:
        return result
    return InFlight(result, journey if journey.async_op else None)


# ---- sizes and layouts


def _dim(call: CollectiveCall, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise call.size_error(f"dim {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _everyones(call: CollectiveCall, name: str, extent: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is None:
        return [extent] * call.group.size
    if len(sizes) != call.group.size or sizes[call.group.rank] != extent or min(sizes) < 0:
        raise call.size_error(
            f"{name} has {extent} places on rank {call.group.rank} of the group, the sizes are {list(sizes)}"
        )
    return list(sizes)
