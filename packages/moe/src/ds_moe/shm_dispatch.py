"""Rows to experts and back for ranks of one host: every rank takes what it needs straight out of its peers' memory.

Words as in `dispatch`. A rank publishes its tokens once, unsorted, how many of its rows each expert gets, and which token each row is; the
ranks of the experts gather their rows out of that, already in the order (expert, source). Results are published where they were made, and each rank weighs and sums
its own where they are. Compared with an all-to-all nothing is packed for sending, put in order after receiving, or copied home:

    tokens -> published -> gathered in order -> experts -> published -> weighted sum

Gradients go the same ways: those of sums are published like tokens and weighed where the experts are, those of tokens are summed like results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_comm import Group
from ds_comm.shm.shm_window import ShmWindow
from ds_comm.shm.symmetric_arena import arena_refusal
from ds_config.errors import CommError
from ds_ops.moe_routing import Pulls, RowPermutation, pulls_of
from ds_ops.row_ops import gather_rows, gather_sum, row_products, weighed

__all__ = ["DispatchPlan", "Windows", "check_alike", "make_reducer", "pull_home", "pull_rows", "pull_tokens"]

_FEWEST_ROWS = 256


class Windows:
    """The shared buffers of one expert group: one a width and dtype, made when first needed. Memory is taken where it is touched.

    Attributes:
        usable: Whether the ranks can share memory; None before they were asked.
        rows: Of each rank in every window.
    """

    def __init__(self) -> None:
        self.usable: bool | None = None
        self.rows = _FEWEST_ROWS
        self._windows: dict[tuple[int, torch.dtype], ShmWindow] = {}

    def ask(self, group: Group) -> bool:
        """Whether the ranks of `group` can share memory. Collective the first time."""
        if self.usable is None:
            self.usable = not arena_refusal(group)
        return self.usable

    def has(self, width: int, dtype: torch.dtype) -> bool:
        """Whether there is such a window: the same on all ranks."""
        return (width, dtype) in self._windows

    def of(self, group: Group, width: int, dtype: torch.dtype) -> ShmWindow:
        """Return the window of that width and dtype. Collective the first time."""
        window = self._windows.get((width, dtype))
        if window is None:
            window = self._windows[width, dtype] = ShmWindow(group, self.rows, width, dtype)
        return window

    def grow(self, rows: int) -> None:
        """Grow every window to at least `rows` rows of each rank. Collective, the same on all ranks.

        Growth discards the published rows.
        """
        if rows > self.rows:
            self.rows = 1 << (rows - 1).bit_length()
            for window in self._windows.values():
                window.grow(self.rows)

    def close(self) -> None:
        """End them."""
        for window in self._windows.values():
            window.close()
        self._windows.clear()


class DispatchPlan:
    """One call of one layer: where each row of this rank's experts is, and where each choice's result is.

    Args:
        counts: int64 [P, E]: the rows of each rank for each expert.

    Attributes:
        first: What was published before any gradient: tokens, or rows.
    """

    def __init__(
        self, group: Group, windows: Windows, choices: RowPermutation, counts: Tensor, first: ShmWindow
    ) -> None:
        self.first = first
        self._group, self._windows, self._choices, self._counts = group, windows, choices, counts
        self._made_for = -1
        self._tokens: Tensor | None = None

    def publish(self, x: Tensor, unit: str, beside: Tensor | None = None) -> tuple[ShmWindow, ShmWindow | None]:
        """Write rows, and one number for each row sorted by expert, and let the others take them. Collective."""
        written = self._windows.of(self._group, x.shape[1], x.dtype)
        written.local[: x.shape[0]].copy_(x)
        if beside is None:
            written.publish(unit)
            return written, None
        numbers = self._windows.of(self._group, 1, beside.dtype)
        numbers.local[: beside.shape[0], 0].copy_(beside)
        written.publish(unit)
        numbers.show()
        return written, numbers

    def ends(self) -> Tensor:
        """Return the ends of the rows of each of this rank's experts, int64 [E / P]."""
        return self._at().ends

    def keep_tokens(self, numbers: ShmWindow) -> None:
        """Save the token index of each row from the published numbers."""
        self._tokens = self.arriving(numbers).view(-1)

    def arriving(self, window: ShmWindow) -> Tensor:
        """Gather published rows, sorted by expert on their source rank, in the order of this rank's experts."""
        return gather_rows(window.everyone, self._at().inward)

    def of_tokens(self, window: ShmWindow) -> Tensor:
        """Gather published tokens in the order of this rank's experts: a row for each choice of such an expert."""
        at = self._at()
        if self._tokens is None:  # rows were published sorted, so nobody was told
            self.keep_tokens(self.publish(_tokens_of(self._choices)[:, None], "moe tokens")[0])
        assert self._tokens is not None
        return gather_rows(window.everyone, at.source + self._tokens)

    def home(self) -> Tensor:
        """Return the combine index [T * k]: where in a window each of this rank's rows has its result.

        The rows are sorted by expert.
        """
        at = self._at()
        lost = self._choices.slots.numel() - at.home.numel()
        # What no expert had is the last row of this rank's own part, which nobody writes: zeros.
        return (
            torch.cat((at.home, at.home.new_full((lost,), (self._group.rank + 1) * self._made_for - 1)))
            if lost
            else at.home
        )

    def home_of_choices(self) -> Tensor:
        """Return the combine index [T, k] by choice: where in a window each choice has its result."""
        return self.home()[self._choices.rows]

    def sorted(self, of_choices: Tensor) -> Tensor:
        """Sort the numbers of choices [T, k] by expert, as [T * k]."""
        return of_choices.reshape(-1)[self._choices.slots]

    def _at(self) -> Pulls:
        if self._made_for != self._windows.rows:  # another layer may have made the windows larger
            self._made_for = self._windows.rows
            self._pulls = pulls_of(self._counts, self._group.rank, self._made_for)
        return self._pulls


def _tokens_of(choices: RowPermutation) -> Tensor:
    """Return the token of each row, [T * k]."""
    return torch.div(choices.slots, max(1, choices.rows.shape[1]), rounding_mode="floor")


def make_reducer(
    x: Tensor, choices: RowPermutation, group: Group, windows: Windows, *, is_sorted: bool
) -> DispatchPlan:
    """Publish rows, and tell all ranks how many each expert gets. Collective; the ranks meet once if the windows have room.

    Args:
        x: [T, n] tokens, or [T * k, n] rows if `is_sorted`.

    Raises:
        CommError: ranks have rows of different width or dtype ("moe-ranks-differ").
    """
    x = x.detach()
    tokens = None if is_sorted else _tokens_of(choices)
    counts, rows = choices.counts, choices.slots.numel()
    experts = counts.numel()
    head = windows.of(group, experts + 4, torch.int64)
    # Rows are written before anybody knows whether all ranks can: most often they can.
    early = windows.has(x.shape[1], x.dtype) and (is_sorted or windows.has(1, torch.int64)) and rows < windows.rows
    written = [(x, windows.of(group, x.shape[1], x.dtype))] if early else []
    if early and tokens is not None:
        written.append((tokens[:, None], windows.of(group, 1, torch.int64)))
    for part, window in written:
        window.local[: part.shape[0]].copy_(part)
    head.local[0, :experts] = counts
    head.local[0, experts:] = torch.tensor([x.shape[1], x.element_size(), rows, early], device="cpu")
    head.publish("moe counts")
    table = head.everyone[:: windows.rows].clone()
    widths, sizes, numbers_of_rows, early_ones = table[:, experts:].t().tolist()
    check_alike([*zip(widths, sizes, strict=True)], [x.shape[1], x.element_size()], group)
    most = sum(numbers_of_rows)  # that a rank may come to hold
    if all(early_ones) and most < windows.rows:
        for _, window in written:
            window.show()
        way = DispatchPlan(group, windows, choices, table[:, :experts], written[0][1])
        if tokens is not None:
            way.keep_tokens(written[1][1])
        return way
    windows.grow(most + 1)
    way = DispatchPlan(group, windows, choices, table[:, :experts], windows.of(group, x.shape[1], x.dtype))
    _, numbers = way.publish(x, "moe dispatch", tokens)
    if numbers is not None:
        way.keep_tokens(numbers)
    return way


def check_alike(headers: Sequence[Sequence[int]], expected: Sequence[int], group: Group) -> None:
    """Raise if a rank's rows are others than `expected`: (elements, bytes of one).

    Raises:
        CommError: they are ("moe-ranks-differ").
    """
    if any(list(row) != list(expected) for row in headers):
        raise CommError(
            f"rows of {expected[0]} elements of {expected[1]} bytes here; on the ranks of {group}: {[tuple(row) for row in headers]}",
            code="moe-ranks-differ",
            fix="Give the layer inputs of one width and dtype on every rank.",
        )


def pull_tokens(x: Tensor, way: DispatchPlan) -> Tensor:
    """Gather the rows of this rank's experts from tokens [T, n] on all ranks, which `make_reducer` published.

    The gradient is collective.
    """
    out: Tensor = _Tokens.apply(x, way)
    return out


def pull_rows(rows: Tensor, way: DispatchPlan) -> Tensor:
    """Gather the rows of this rank's experts from rows [T * k, n] that are sorted by expert, on all ranks.

    The gradient is collective.
    """
    out: Tensor = _PulledRows.apply(rows, way)
    return out


def pull_home(results: Tensor, weights: Tensor, way: DispatchPlan) -> Tensor:
    """Results of this rank's experts to the ranks whose rows they are, weighed and summed there: [T, m].

    Args:
        weights: [T, k] of this rank's choices; 0 for those that no expert had.
    Collective, as its gradient is; weights ask for one on all ranks or on none.
    """
    out: Tensor = _Home.apply(results, weights, way)
    return out


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: DispatchPlan) -> Tensor:
        ctx.way = way
        return way.of_tokens(way.first)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        window, _ = ctx.way.publish(grads[0], "moe dispatch.grad")
        return gather_sum(window.everyone, ctx.way.home_of_choices()), None


class _PulledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: DispatchPlan) -> Tensor:
        ctx.way = way
        return way.arriving(way.first)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        window, _ = ctx.way.publish(grads[0], "moe dispatch.grad")
        return gather_rows(window.everyone, ctx.way.home()), None


class _Home(torch.autograd.Function):
    """Gradients of the sums are taken by the ranks of the experts, which have the results too: so nothing is saved on the source rank."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, way: DispatchPlan) -> Tensor:
        ctx.way = way
        window, _ = way.publish(results, "moe combine")
        out = gather_sum(window.everyone, way.home_of_choices(), weights)
        ctx.save_for_backward(results if ctx.needs_input_grad[1] else None, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (results, weights), way = ctx.saved_tensors, ctx.way
        window, numbers = way.publish(grads[0], "moe combine.grad", way.sorted(weights))
        got, factors = way.of_tokens(window), way.arriving(numbers).view(-1)
        of_weights = None
        if ctx.needs_input_grad[1]:
            window, _ = way.publish(row_products(got, results)[:, None], "moe weights.grad")
            of_weights = window.everyone[:, 0][way.home_of_choices()].to(weights.dtype)
        return weighed(got, factors), of_weights, None
