"""Sums of embedding gradients by rows: only rows that some rank looked up travel, as (index, values).

A step looks up few of the rows of an embedding, and all others have zero gradient. Each rank finds the rows of its gradient
that are not zero (for a dense and a `sparse=True` embedding alike), all ranks learn the largest number of them, gather
indices and values padded to it, and add them up in the order of the ranks. Where this would send more than an all-reduce of the
table (the weight is tied to a head, the batch is large) the table is all-reduced; every rank knows the numbers, so all choose
alike.

Sends, for W ranks, k rows at most on a rank, D values of s bytes in a row: (W-1) k (8 + D s) bytes, against 2 (W-1)/W R D s of the
dense sum of R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ds_comm as comm
from ds_comm import Group, Work
from ds_zero.layout.elements import UnitLayout

__all__ = ["RowSum", "Table", "by_rows", "row_sum", "tables"]


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


def row_sum(layout: UnitLayout, names: frozenset[str], unit: str) -> RowSum | None:
    """How a unit is summed of which the parameters `names` are embeddings; None if none of its is."""
    found = [
        Table(slot.offset, slot.shape[0], math.prod(slot.shape[1:]))
        for slot in layout.slots
        if slot.name in names and slot.numel
    ]
    return RowSum(tuple(found), unit) if found else None


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
