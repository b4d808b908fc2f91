"""Rows to experts and back for ranks of one host: every rank takes what it needs straight out of its peers' memory.

Words as in `dispatch`. A rank publishes its tokens once, unsorted, and which token each of its rows is; the ranks of the experts gather
their rows out of that, already in the order (expert, source). Results are published where they were made, and each rank weighs and sums
its own where they are. Compared with an all-to-all nothing is packed for sending, put in order after receiving, or copied home:

    tokens -> published -> gathered in order -> experts -> published -> weighted sum

Gradients go the same ways: those of sums are published like tokens and weighed where the experts are, those of tokens are summed like results.
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
from ds_ops.routing import Permutation, gather_sum, row_products, weighed

__all__ = ["Pulls", "Way", "Windows", "pull_home", "pull_rows", "pull_tokens", "pulls_of"]


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


class Way:
    """One call of one layer: where each row of this rank's experts is, and where each choice's result is.

    Args:
        choices: The choices of this rank, sorted.
        pulls: Of this rank.
        most: The most rows that a rank may come to hold. The same on all ranks.
    """

    def __init__(self, group: Group, windows: Windows, choices: Permutation, pulls: Pulls, most: int) -> None:
        self._group, self._windows, self._most = group, windows, most
        self._k = max(1, choices.rows.shape[1])
        self.slots = choices.slots
        self._from, self._at = _spread(pulls.inward)
        holder, there = _spread(pulls.homeward)
        # What no expert had is the last row of this rank's own part, which nobody writes: zeros.
        lost = self.slots.numel() - pulls.sent
        holder = torch.cat((holder, holder.new_full((lost,), group.rank)))
        self._holder, self._there = holder, torch.cat((there, there.new_full((lost,), -1)))
        self._rows = choices.rows
        self._slot_there: Tensor | None = None

    def publish(self, x: Tensor, unit: str) -> Window:
        """Write rows and let the others take them. Collective."""
        window = self._windows.of(self._group, self._most + 1, x.shape[1], x.dtype)
        window.mine[: x.shape[0]].copy_(x)
        window.publish(unit)
        return window

    def publish_tokens(self, x: Tensor, unit: str) -> Window:
        """As `publish`; what tells which token each row is goes with them, so that the ranks meet once. Collective."""
        if self._slot_there is not None:
            return self.publish(x, unit)
        slots = self._windows.of(self._group, self._most + 1, 1, self.slots.dtype)
        slots.mine[: self.slots.shape[0], 0].copy_(self.slots)
        window = self.publish(x, unit)
        slots.show()
        self._slot_there = self.arriving(slots).view(-1)
        return window

    def arriving(self, window: Window) -> Tensor:
        """Published rows, which are sorted by expert at home, in the order of this rank's experts."""
        return window.everyone.index_select(0, self._from * window.rows + self._at)

    def of_slots(self, window: Window) -> Tensor:
        """Published values of slots in that order."""
        return window.everyone.index_select(0, self._from * window.rows + self._slots())

    def of_tokens(self, window: Window) -> Tensor:
        """Published tokens in that order: each as often as an expert of this rank was chosen for it."""
        tokens = torch.div(self._slots(), self._k, rounding_mode="floor")
        return window.everyone.index_select(0, self._from * window.rows + tokens)

    def home(self, window: Window) -> Tensor:
        """[T * k]: where in the window each of this rank's rows, sorted by expert, has its result."""
        return self._holder * window.rows + torch.where(self._there < 0, window.rows - 1, self._there)

    def home_of_choices(self, window: Window) -> Tensor:
        """[T, k]: the same of each choice."""
        return self.home(window)[self._rows]

    def _slots(self) -> Tensor:
        """Which slot, of its home, each row here is. Collective the first time."""
        if self._slot_there is None:
            self._slot_there = self.arriving(self.publish(self.slots[:, None], "moe tokens")).view(-1)
        return self._slot_there


def _spread(pulls: Sequence[tuple[int, int, int, int]]) -> tuple[Tensor, Tensor]:
    """For each row here: its rank, and which row it is there. `pulls` ascend without gaps in what they say of here."""
    table = torch.tensor(pulls, dtype=torch.int64).view(-1, 4)
    rank, there, here, number = table.unbind(1)
    # A pull's row i is `there - here` before it in the rank's rows, whichever pull it is of.
    both = torch.stack((rank, there - here)).repeat_interleave(number, 1)
    return both[0], both[1] + torch.arange(both.shape[1])


def pull_tokens(x: Tensor, way: Way) -> Tensor:
    """The rows of this rank's experts, of tokens [T, n] on all ranks. Collective over the group, as its gradient is."""
    out: Tensor = _Tokens.apply(x, way)
    return out


def pull_rows(rows: Tensor, way: Way) -> Tensor:
    """The same of rows [T * k, n] that are sorted by expert. Collective over the group, as its gradient is."""
    out: Tensor = _Rows.apply(rows, way)
    return out


def pull_home(results: Tensor, weights: Tensor, way: Way) -> Tensor:
    """Results of this rank's experts to the ranks whose rows they are, weighed and summed there: [T, m].

    Args:
        weights: [T, k] of this rank's choices; 0 for those that no expert had.
    Collective, as its gradient is; weights ask for one on all ranks or on none.
    """
    out: Tensor = _Home.apply(results, weights, way)
    return out


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.of_tokens(way.publish_tokens(x, "moe dispatch"))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        window = ctx.way.publish(grads[0], "moe dispatch.grad")
        return gather_sum(window.everyone, ctx.way.home_of_choices(window)), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.arriving(way.publish(rows, "moe dispatch"))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        window = ctx.way.publish(grads[0], "moe dispatch.grad")
        return window.everyone.index_select(0, ctx.way.home(window)), None


class _Home(torch.autograd.Function):
    """Gradients of the sums are taken by the ranks of the experts, which have the results too: so nothing is kept at home."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, way: Way) -> Tensor:
        ctx.way = way
        window = way.publish(results, "moe combine")
        out = gather_sum(window.everyone, way.home_of_choices(window), weights)
        ctx.save_for_backward(results if ctx.needs_input_grad[1] else None, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (results, weights), way = ctx.saved_tensors, ctx.way
        got = way.of_tokens(way.publish(grads[0], "moe combine.grad"))
        of_weights = None
        if ctx.needs_input_grad[1]:
            window = way.publish(row_products(got, results)[:, None], "moe weights.grad")
            of_weights = window.everyone[:, 0][way.home_of_choices(window)].to(weights.dtype)
        factors = way.of_slots(way.publish(weights.reshape(-1, 1), "moe weights"))
        return weighed(got, factors.view(-1)), of_weights, None
