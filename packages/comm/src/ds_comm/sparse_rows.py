"""Sums of tables of which few rows are not zero: only those rows are sent.

A step looks up few rows of an embedding; all others have zero gradient. All ranks learn the largest number of rows
that one rank has, gather indices and values padded to it, and add them up in the order of the ranks. Where that would send more
than an all-reduce of the table, the table is all-reduced; every rank knows the numbers, so all choose alike. Sends, for W ranks, k rows
at most on a rank, D values of s bytes in a row: (W-1) k (8 + D s) bytes, against 2 (W-1)/W R D s of the dense sum of R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_comm.collectives import all_gather_single, all_reduce
from ds_comm.groups import Group
from ds_comm.work import Work

__all__ = ["EmbeddingTable", "by_rows", "sum_rows"]


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """An embedding in a flat buffer: `rows` x `width` elements from `offset`."""

    offset: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.offset + self.rows * self.width


def by_rows(table: EmbeddingTable, most: int, world: int, itemsize: int) -> bool:
    """Whether `most` rows a rank send fewer bytes than the whole table does. Pure."""
    return world * most * (8 + table.width * itemsize) < 2 * table.rows * table.width * itemsize


def sum_rows(flat: Tensor, tables: Sequence[EmbeddingTable], group: Group, unit: str = "") -> list[Work]:
    """Sum `flat` in place over the ranks: its tables by rows, the ranges between them as they are. Collective.

    Tables are done on return, the rest when the works are waited for.

    Args:
        tables: In the order of the buffer.
    """
    if group.size == 1:
        return []
    edges = [0, *(edge for table in tables for edge in (table.offset, table.stop)), flat.numel()]
    between = [flat[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    works = [all_reduce(part, group=group, async_op=True, unit=unit) for part in between]
    with torch.no_grad():
        views = [flat[table.offset : table.stop].view(table.rows, table.width) for table in tables]
        used = [(view != 0).any(1).nonzero().view(-1) for view in views]
        counts = _counts(used, flat.device, group, unit)
        for table, view, rows, of_ranks in zip(tables, views, used, counts, strict=True):
            if by_rows(table, max(of_ranks), group.size, flat.element_size()):
                _add_rows(view, rows, of_ranks, group, unit)
            else:
                works.append(all_reduce(view, group=group, async_op=True, unit=unit))
    return works


def _counts(used: Sequence[Tensor], device: torch.device, group: Group, unit: str) -> list[list[int]]:
    """Gather how many rows each rank has, by table and rank."""
    local_counts = torch.tensor([len(rows) for rows in used], dtype=torch.int64, device=device)
    every = torch.empty(group.size * len(used), dtype=torch.int64, device=device)
    all_gather_single(every, local_counts, group=group, unit=unit)
    counts: list[list[int]] = every.view(group.size, -1).t().tolist()
    return counts


def _add_rows(view: Tensor, rows: Tensor, of_ranks: Sequence[int], group: Group, unit: str) -> None:
    most, width = max(of_ranks), view.shape[1]
    if most == 0:
        return
    index, values = rows.new_zeros(most), view.new_zeros(most, width)
    index[: len(rows)], values[: len(rows)] = rows, view[rows]
    indices, all_values = index.new_empty(group.size * most), values.new_empty(group.size * most * width)
    all_gather_single(indices, index, group=group, unit=unit)
    all_gather_single(all_values, values.view(-1), group=group, unit=unit)
    view[rows] = 0
    # Rank by rank: the order of the terms, and so the sum, is the same everywhere.
    parts = zip(indices.view(group.size, -1), all_values.view(group.size, most, width), of_ranks, strict=True)
    for where, what, count in parts:
        view.index_add_(0, where[:count], what[:count])
