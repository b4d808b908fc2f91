"""How the gradients of a unit are summed over the ranks, one strategy for each `Reduction` of the plan.

    arena       a flat buffer with all gradients, and the collective of the backend; at stage 0 embeddings may be summed by rows
    quantized   the same, of which small codes are sent
    posting     in memory that the ranks share, out of the tensors that autograd made (`posting.py`)
    exchange    by messages, out of the same tensors (`exchange.py`)

Note "sums by rows". A step looks up few rows of an embedding; all others have zero gradient. All ranks learn the largest number of rows
that one rank has, gather indices and values padded to it, and add them up in the order of the ranks. Where that would send more
than an all-reduce of the table, the table is all-reduced; every rank knows the numbers, so all choose alike. Sends, for W ranks, k rows
at most on a rank, D values of s bytes in a row: (W-1) k (8 + D s) bytes, against 2 (W-1)/W R D s of the dense sum of R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ds_comm as comm
from ds_comm import Group, Work
from ds_zero.layout.plan import Reduction, UnitPlan
from ds_zero.runtime.exchange import Exchange
from ds_zero.runtime.posting import Posting
from ds_zero.runtime.seat import Seat

__all__ = ["RowSum", "Table", "Way", "by_rows", "tables", "way_of"]


class Way:
    """Sums an arena by a collective; the interface of all ways. All ranks make the same calls in the same order.

    Attributes:
        ranges: (start, stop) in the shard, one after the other, from 0 to its end: a sum is one tensor for each. No piece of a
            parameter lies in two of them.
        full_bytes: Held instead of an arena.
    """

    full_bytes = 0

    def __init__(self, plan: UnitPlan, seat: Seat) -> None:
        self.plan = plan
        self.ranges: tuple[tuple[int, int], ...] = ((0, plan.layout.shard_numel),)
        self._codes, self._errors = plan.wire.sums(seat.levels)
        self._rows: RowSum | None = None
        self._arena: Tensor | None = None
        self._works: list[Work] = []

    def take(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> bool:
        """Take gradients by number of the parameter as they are; False: they have to be in an arena.

        Args:
            finish: Finishes this reduction on this rank.
        """
        del grads, dtype, finish
        return False

    def begin(self, arena: Tensor | None, finish: Callable[[], None]) -> torch.dtype:
        """Say to the others what this rank has: the arena, or without one what was taken. Returns the format of the sum."""
        del finish
        if arena is None:
            raise RuntimeError(f"unit {self.plan.name} has no gradient buffer to reduce")
        self._arena = arena
        return arena.dtype

    def own(self) -> Sequence[Tensor | None]:
        """Of each range where its sum may be, in memory of its own terms; None: elsewhere."""
        # A sum that is also one of its terms would need memory for the term that comes.
        alone = self.plan.layout.world == 1 and self._arena is not None
        return [self._arena[: self.plan.layout.shard_numel] if alone and self._arena is not None else None]

    def start(self, outs: Sequence[Tensor], seat: Seat) -> None:
        """Start to sum into `outs`, one tensor a range."""
        (out,), arena, layout = outs, self._arena, self.plan.layout
        for segment in layout.segments if arena is not None else ():
            inp = arena[segment.start : segment.start + segment.chunk * layout.world]  # type: ignore[index]
            self._works.append(self._scatter(out[segment.at : segment.at + segment.chunk], inp, seat, segment.at))
        if layout.world == 1 and self._rows is not None:
            self._works += self._rows.start(out, seat.replicas)
        elif layout.world == 1:
            self._works.append(comm.all_reduce(out, group=seat.replicas, async_op=True, unit=self.plan.name))

    def _scatter(self, mine: Tensor, inp: Tensor, seat: Seat, at: int) -> Work:
        name = self.plan.name
        if self._codes is None:
            return comm.reduce_scatter_single(mine, inp, group=seat.shards, async_op=True, unit=name)
        # Errors are kept by this name.
        unit = name if len(self.plan.layout.segments) == 1 else f"{name}.{at}"
        return self._codes.reduce_scatter_single(mine, inp, group=seat.shards, async_op=True, unit=unit)

    def finish(self, outs: Sequence[Tensor]) -> float | None:
        """Wait until `outs` are the sums. Returns the sum of their squares where that costs no pass of its own."""
        del outs
        for work in self._works:
            work.wait()
        self._works.clear()
        self._arena = None
        return None

    def drop(self) -> None:
        """Forget what was taken and not summed."""

    def sum_rows(self, names: frozenset[str]) -> None:
        """Send of the embeddings `names` only rows that are not zero."""
        slots = [slot for slot in self.plan.layout.slots if slot.name in names and slot.numel]
        found = [Table(slot.offset, slot.shape[0], math.prod(slot.shape[1:])) for slot in slots]
        self._rows = RowSum(tuple(found), self.plan.name) if found else None

    def rescale(self, factor: float) -> None:
        """The next gradients are so many times as large; 0: nothing is known of them. So are errors that they correct."""
        if self._errors is not None and factor:
            self._errors.rescale(factor)
        elif self._errors is not None:
            self._errors.clear()

    @property
    def error_bytes(self) -> int:
        """Held for errors of codes."""
        return 0 if self._errors is None else self._errors.nbytes


class _Direct(Way):
    """Sums out of the tensors that autograd made. A sum takes the memory of one of its terms where it may."""

    def __init__(self, plan: UnitPlan, seat: Seat, by: Posting | Exchange) -> None:
        super().__init__(plan, seat)
        self._by = by
        # One tensor where what was summed is sent on to other ranks.
        self._in_place = seat.replicas.size == 1
        if self._in_place:
            self.ranges = tuple((run.start, run.stop) for run in by.plan.runs)

    def take(self, grads: Mapping[int, Tensor], dtype: torch.dtype, finish: Callable[[], None]) -> bool:
        self._by.publish(grads, dtype, finish)
        return True

    def begin(self, arena: Tensor | None, finish: Callable[[], None]) -> torch.dtype:
        if arena is not None:
            self._by.publish_flat(arena, finish)
        self._by.post()
        return self._by.dtype

    def own(self) -> Sequence[Tensor | None]:
        return [self._by.kept(run) for run in self._by.plan.runs] if self._in_place else [None]

    def start(self, outs: Sequence[Tensor], seat: Seat) -> None:
        """Nothing: the others read, or get, what `begin` posted."""

    def finish(self, outs: Sequence[Tensor]) -> float | None:
        if not self._in_place:
            outs = [outs[0][run.start : run.stop] for run in self._by.plan.runs]
        return self._by.pull(outs)

    def drop(self) -> None:
        self._by.drop()

    @property
    def full_bytes(self) -> int:  # type: ignore[override]
        return self._by.nbytes


def way_of(plan: UnitPlan, seat: Seat) -> Way:
    """The strategy that the plan chose."""
    if plan.reduction is Reduction.POSTING and seat.host is not None:
        return _Direct(plan, seat, Posting(seat.host, plan.layout, seat.shards.rank, plan.name))
    if plan.reduction is Reduction.EXCHANGE:
        return _Direct(plan, seat, Exchange(seat.shards, plan.layout, seat.pool, plan.name))
    return Way(plan, seat)


# ---- sums by rows


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding in a flat buffer: `rows` x `width` elements from `offset`."""

    offset: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.offset + self.rows * self.width


def tables(model: nn.Module) -> frozenset[str]:
    """Names of the weights of all nn.Embedding and nn.EmbeddingBag."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    owners = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return frozenset(name for name, param in model.named_parameters() if id(param) in owners)


def by_rows(table: Table, most: int, world: int, itemsize: int) -> bool:
    """Whether `most` rows a rank send fewer bytes than the whole table does. Pure."""
    return world * most * (8 + table.width * itemsize) < 2 * table.rows * table.width * itemsize


@dataclass(frozen=True, slots=True)
class RowSum:
    """Sums a flat buffer over ranks: its tables by rows, the ranges between them as they are.

    Attributes:
        tables: In the order of the buffer.
        unit: Whose it is, for messages.
    """

    tables: tuple[Table, ...]
    unit: str

    def start(self, flat: Tensor, group: Group) -> list[Work]:
        """Sum `flat` in place. Its tables are done on return, the rest when the works are waited for. Collective."""
        if group.size == 1:
            return []
        edges = [0, *(edge for table in self.tables for edge in (table.offset, table.stop)), flat.numel()]
        between = [flat[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        works = [comm.all_reduce(part, group=group, async_op=True, unit=self.unit) for part in between]
        with torch.no_grad():
            views = [flat[table.offset : table.stop].view(table.rows, table.width) for table in self.tables]
            used = [(view != 0).any(1).nonzero().view(-1) for view in views]
            counts = self._counts(used, flat.device, group)
            for table, view, rows, of_ranks in zip(self.tables, views, used, counts, strict=True):
                if by_rows(table, max(of_ranks), group.size, flat.element_size()):
                    self._add_rows(view, rows, of_ranks, group)
                else:
                    works.append(comm.all_reduce(view, group=group, async_op=True, unit=self.unit))
        return works

    def _counts(self, used: Sequence[Tensor], device: torch.device, group: Group) -> list[list[int]]:
        """How many rows each rank has, by table and rank."""
        mine = torch.tensor([len(rows) for rows in used], dtype=torch.int64, device=device)
        every = torch.empty(group.size * len(used), dtype=torch.int64, device=device)
        comm.all_gather_single(every, mine, group=group, unit=self.unit)
        found: list[list[int]] = every.view(group.size, -1).t().tolist()
        return found

    def _add_rows(self, view: Tensor, rows: Tensor, of_ranks: Sequence[int], group: Group) -> None:
        most, width = max(of_ranks), view.shape[1]
        if most == 0:
            return
        index, values = rows.new_zeros(most), view.new_zeros(most, width)
        index[: len(rows)], values[: len(rows)] = rows, view[rows]
        indices, all_values = index.new_empty(group.size * most), values.new_empty(group.size * most * width)
        comm.all_gather_single(indices, index, group=group, unit=self.unit)
        comm.all_gather_single(all_values, values.view(-1), group=group, unit=self.unit)
        view[rows] = 0
        # Rank by rank: the order of the terms, and so the sum, is the same everywhere.
        parts = zip(indices.view(group.size, -1), all_values.view(group.size, most, width), of_ranks, strict=True)
        for where, what, count in parts:
            view.index_add_(0, where[:count], what[:count])
