"""Rows to experts and back for ranks of one host: every rank takes what it needs straight out of its peers' memory.

Words as in `dispatch`. A rank publishes its tokens once, unsorted, and which token each of its rows is; the ranks of the experts gather
their rows out of that, already in the order (expert, source). Results are published where they were made, and each rank copies its own
back. Compared with an all-to-all nothing is packed for sending or put in order after receiving:

    tokens -> published -> gathered in order -> experts -> published -> copied back as rows -> weighted sum

Gradients go the same ways: of results as rows published by their homes, of tokens as results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group
from ds_comm.arena import arena_refusal
from ds_comm.pull import Window
from ds_ops.routing import Permutation, unpermute

__all__ = ["Pulls", "Windows", "pull_home", "pull_rows", "pull_tokens", "pulls_of"]


@dataclass(frozen=True, slots=True)
class Pulls:
    """Which rows one rank takes from which others, and they from it. Pure numbers.

    Attributes:
        inward: What this rank's experts take: (source rank, its first row there, first row here, how many), here by expert, then source.
        homeward: What comes back: (rank of the expert, its first row there, first row here, how many), here sorted by expert.
        bounds: Where each local expert's rows end.
        sent: Rows of this rank that an expert has; those that were dropped come after them.
    """

    inward: tuple[tuple[int, int, int, int], ...]
    homeward: tuple[tuple[int, int, int, int], ...]
    bounds: tuple[int, ...]
    sent: int


def pulls_of(counts: Sequence[Sequence[int]], rank: int) -> Pulls:
    """The pulls of one rank.

    Args:
        counts: Of each rank, its rows for each expert of all ranks; rows are sorted by expert.
    """
    ranks, local = len(counts), len(counts[0]) // len(counts)
    starts = []  # of each rank and expert, the first row
    for row in counts:
        starts.append([sum(row[:expert]) for expert in range(len(row))])
    inward, bounds, at = [], [], 0
    for expert in range(rank * local, (rank + 1) * local):
        for source in range(ranks):
            if number := counts[source][expert]:
                inward.append((source, starts[source][expert], at, number))
                at += number
        bounds.append(at)
    homeward = []
    for holder in range(ranks):
        there = 0
        for expert in range(holder * local, (holder + 1) * local):
            for source in range(ranks):
                number = counts[source][expert]
                if source == rank and number:
                    homeward.append((holder, there, starts[rank][expert], number))
                there += number
    return Pulls(tuple(inward), tuple(homeward), tuple(bounds), sum(counts[rank]))


class Windows:
    """The shared buffers of one expert group: one a width and dtype, made when first needed. Memory is taken where it is touched.

    Attributes:
        usable: Whether the ranks can share memory; None before they were asked.
    """

    def __init__(self) -> None:
        self.usable: bool | None = None
        self._made: dict[tuple[int, torch.dtype], Window] = {}

    def ask(self, group: Group) -> bool:
        """Whether the ranks of `group` can share memory. Collective the first time."""
        if self.usable is None:
            self.usable = not arena_refusal(group)
        return self.usable

    def of(self, group: Group, rows: int, width: int, dtype: torch.dtype) -> Window:
        """A window of at least `rows` rows a rank. Collective where there was not enough."""
        room = 1 << max(8, (max(rows, 1) - 1).bit_length())
        found = self._made.get((width, dtype))
        if found is None:
            found = self._made[width, dtype] = Window(group, room, width, dtype)
        elif found.rows < rows:
            found.grow(room)
        return found

    def close(self) -> None:
        """End them."""
        for window in self._made.values():
            window.close()
        self._made.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One layer's call: its group and windows, the pulls, and the most rows that a rank may come to hold."""

    group: Group
    windows: Windows
    pulls: Pulls
    most: int

    def publish(self, x: Tensor, unit: str) -> Window:
        """Write rows and let the others take them. Collective."""
        window = self.windows.of(self.group, self.most, x.shape[1], x.dtype)
        window.mine[: x.shape[0]].copy_(x)
        window.publish(unit)
        return window

    def take_in(self, window: Window, like: Tensor) -> Tensor:
        """Published rows in the order of this rank's experts."""
        out = like.new_empty(self.pulls.bounds[-1], like.shape[1])
        for source, there, here, number in self.pulls.inward:
            out[here : here + number].copy_(window.rows_of(source)[there : there + number])
        return out

    def take_home(self, window: Window, like: Tensor, rows: int) -> Tensor:
        """Published results as this rank's rows; zeros for those that no expert had."""
        out = like.new_empty(rows, like.shape[1])
        for holder, there, here, number in self.pulls.homeward:
            out[here : here + number].copy_(window.rows_of(holder)[there : there + number])
        out[self.pulls.sent :].zero_()
        return out


def pull_tokens(x: Tensor, choices: Permutation, way: Way) -> Tensor:
    """The rows of this rank's experts, of tokens [T, n] on all ranks. Collective over the group, as its gradient is."""
    out: Tensor = _Tokens.apply(x, choices, way)
    return out


def pull_rows(rows: Tensor, way: Way) -> Tensor:
    """The same of rows [T * k, n] that are sorted by expert. Collective over the group, as its gradient is."""
    out: Tensor = _Rows.apply(rows, way)
    return out


def pull_home(results: Tensor, rows: int, way: Way) -> Tensor:
    """Results of this rank's experts to the ranks whose rows they are: [T * k, m], sorted by expert. Collective, as its gradient is."""
    out: Tensor = _Home.apply(results, rows, way)
    return out


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: Permutation, way: Way) -> Tensor:
        ctx.choices, ctx.way = choices, way
        tokens = way.windows.of(way.group, way.most, 1, torch.int64)
        width = choices.rows.shape[1]
        torch.div(choices.slots, width, rounding_mode="floor", out=tokens.mine[: choices.slots.numel(), 0])
        tokens.publish("moe tokens")
        window = way.publish(x, "moe dispatch")
        out = x.new_empty(way.pulls.bounds[-1], x.shape[1])
        for source, there, here, number in way.pulls.inward:
            index = tokens.rows_of(source)[there : there + number, 0]
            torch.index_select(window.rows_of(source), 0, index, out=out[here : here + number])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        way, choices = ctx.way, ctx.choices
        window = way.publish(grads[0], "moe dispatch.grad")
        return unpermute(way.take_home(window, grads[0], choices.slots.numel()), choices), None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way, ctx.rows = way, rows.shape[0]
        return way.take_in(way.publish(rows, "moe dispatch"), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        way = ctx.way
        return way.take_home(way.publish(grads[0], "moe dispatch.grad"), grads[0], ctx.rows), None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Tensor, rows: int, way: Way) -> Tensor:
        ctx.way = way
        return way.take_home(way.publish(results, "moe combine"), results, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        way = ctx.way
        return way.take_in(way.publish(grads[0], "moe combine.grad"), grads[0]), None, None
