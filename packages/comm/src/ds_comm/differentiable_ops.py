"""What differentiable collectives move: descriptions, each of which launches its collective and knows its reverse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

import ds_comm.collectives as collectives
from ds_comm.call import CollectiveCall
from ds_comm.work import DONE, Work

__all__ = [
    "AllGather",
    "CollectiveOp",
    "Copy",
    "DimSizes",
    "Launched",
    "Reduce",
    "ReduceScatter",
    "RowMove",
    "SequenceAllToAll",
    "SplitForward",
]


@dataclass(frozen=True, slots=True)
class Launched:
    """A move on its way: where its result will be, what to wait for, and what remains to do then."""

    out: Tensor
    work: Work = DONE
    finish: Callable[[], object] | None = None


class CollectiveOp(Protocol):
    @property
    def call(self) -> CollectiveCall: ...

    def launch(self, x: Tensor, async_op: bool) -> Launched: ...

    def reverse(self) -> CollectiveOp: ...


@dataclass(frozen=True, slots=True)
class RowMove:
    call: CollectiveCall
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        out = x.new_empty((sum(self.receive), *x.shape[1:]))
        work = collectives.all_to_all_single(
            out, x.contiguous(), self.receive, self.send, self.call.group, async_op, unit=self.call.unit
        )
        return Launched(out, work)

    def reverse(self) -> CollectiveOp:
        return RowMove(_back(self.call), self.receive, self.send)


@dataclass(frozen=True, slots=True)
class SequenceAllToAll:
    """`scatter` and `gather`: a dim and its sizes by rank."""

    call: CollectiveCall
    scatter: tuple[int, tuple[int, ...]]
    gather: tuple[int, tuple[int, ...]]

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        (cut, scattered), (put, gathered) = self.scatter, self.gather
        shape = _shape(x, cut, scattered[self.call.group.rank])
        if self.call.takes_views(x.device):
            whole = x.new_empty((*shape[:put], sum(gathered), *shape[put + 1 :]))
            arriving, leaving = list(whole.split(gathered, put)), list(x.split(scattered, cut))
            return Launched(
                whole, collectives.all_to_all(arriving, leaving, self.call.group, async_op, unit=self.call.unit)
            )
        shapes = [(*shape[:put], n, *shape[put + 1 :]) for n in gathered]
        send, receive = [part.numel() for part in x.split(scattered, cut)], [math.prod(s) for s in shapes]
        out = x.new_empty((*shape[:put], sum(gathered), *shape[put + 1 :]))
        outermost = math.prod(shape[:put]) == 1
        flat = out.view(-1) if outermost else x.new_empty(out.numel())
        work = collectives.all_to_all_single(
            flat, _packed(x, cut, scattered), receive, send, self.call.group, async_op, unit=self.call.unit
        )
        if outermost:
            return Launched(out, work)
        parts = [part.view(s) for part, s in zip(flat.split(receive), shapes, strict=True)]
        return Launched(out, work, lambda: torch.cat(parts, put, out=out))

    def reverse(self) -> CollectiveOp:
        return SequenceAllToAll(_back(self.call), self.gather, self.scatter)


@dataclass(frozen=True, slots=True)
class DimSizes:
    """A dim that the ranks share: `sizes[r]` places of it are rank r's."""

    dim: int
    sizes: tuple[int, ...]

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1

    def plain(self, shape: Sequence[int]) -> bool:
        """Whether the whole, of `shape`, is its parts in a row, all of one size: nothing need be copied."""
        return self.even and math.prod(shape[: self.dim]) == 1


@dataclass(frozen=True, slots=True)
class AllGather:
    call: CollectiveCall
    cut: DimSizes
    common: bool

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        dim, sizes, ranks = self.cut.dim, self.cut.sizes, self.call.group.size
        out = x.new_empty(_shape(x, dim, sum(sizes)))
        plain = self.cut.plain(out.shape)
        row = max(sizes) * (out.numel() // sum(sizes) if sum(sizes) else 0)
        rows = out.view(ranks, -1) if plain and row else x.new_empty((ranks, row))
        work = collectives.all_gather_single(rows, _padded(x, row), self.call.group, async_op, unit=self.call.unit)
        if plain:
            return Launched(out, work)
        shapes = [_shape(x, dim, n) for n in sizes]
        parts = [of[: math.prod(s)].view(s) for of, s in zip(rows, shapes, strict=True)]
        return Launched(out, work, lambda: torch.cat(parts, dim, out=out))

    def reverse(self) -> CollectiveOp:
        return (SplitForward if self.common else ReduceScatter)(_back(self.call), self.cut)


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    call: CollectiveCall
    cut: DimSizes

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        dim, sizes, group = self.cut.dim, self.cut.sizes, self.call.group
        out = x.new_empty(_shape(x, dim, sizes[group.rank]))
        if self.cut.even:
            part, whole = out.view(-1), _packed(x, dim, sizes)
        else:
            row = max(sizes) * (x.numel() // sum(sizes))
            part = x.new_empty(row)
            whole = torch.cat([_padded(one, row) for one in x.split(sizes, dim)])
        work = collectives.reduce_scatter_single(part, whole, group=group, async_op=async_op, unit=self.call.unit)
        if self.cut.even:
            return Launched(out, work)
        return Launched(out, work, lambda: out.view(-1).copy_(part[: out.numel()]))

    def reverse(self) -> CollectiveOp:
        return AllGather(_back(self.call), self.cut, common=False)


@dataclass(frozen=True, slots=True)
class SplitForward:
    call: CollectiveCall
    cut: DimSizes

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        part = x.split(self.cut.sizes, self.cut.dim)[self.call.group.rank]
        return Launched(part.clone(memory_format=torch.contiguous_format))

    def reverse(self) -> CollectiveOp:
        return AllGather(_back(self.call), self.cut, common=True)


@dataclass(frozen=True, slots=True)
class Copy:
    call: CollectiveCall

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        return Launched(x)

    def reverse(self) -> CollectiveOp:
        return Reduce(_back(self.call))


@dataclass(frozen=True, slots=True)
class Reduce:
    call: CollectiveCall

    def launch(self, x: Tensor, async_op: bool) -> Launched:
        out = x.clone(memory_format=torch.contiguous_format)
        return Launched(out, collectives.all_reduce(out, group=self.call.group, async_op=async_op, unit=self.call.unit))

    def reverse(self) -> CollectiveOp:
        return Copy(_back(self.call))


def _shape(x: Tensor, dim: int, places: int) -> tuple[int, ...]:
    return (*x.shape[:dim], places, *x.shape[dim + 1 :])


def _packed(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the parts of `x` along `dim` into a flat tensor; return `x` itself where already in that order."""
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    flat = x.new_empty(x.numel())
    parts = x.split(list(sizes), dim)
    for part, into in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        into.view(part.shape).copy_(part)
    return flat


def _padded(x: Tensor, numel: int) -> Tensor:
    """Flatten `x` and pad with zeros up to `numel` elements."""
    if x.numel() == numel:
        return x.contiguous().view(-1)
    flat = x.new_zeros(numel)
    flat[: x.numel()].view(x.shape).copy_(x)
    return flat


def _back(call: CollectiveCall) -> CollectiveCall:
    """Return the call for a gradient: `layers.0` becomes `layers.0.grad`, whose gradient is `layers.0` again."""
    return replace(call, unit=call.unit.removesuffix(".grad") if call.unit.endswith(".grad") else f"{call.unit}.grad")
