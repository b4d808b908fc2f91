"""How long a program takes, on paper: the clock that schedules are compared by. Knows only actions that compute."""

from __future__ import annotations

from dataclasses import dataclass

from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs

__all__ = ["ScheduleTiming", "Span", "simulate"]

Span = tuple[float, float, Action]  # begin, end, what


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """When everything happens.

    Attributes:
        ranks: Of every rank its actions with begin and end; transfers are left out.
        span: Time until the last rank is done.
        period: Time from one step to the next when steps follow each other and no rank waits for all others between them.
    """

    ranks: tuple[tuple[Span, ...], ...]
    span: float
    period: float

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait, 0 to 1, in one step alone."""
        busy = sum(end - begin for row in self.ranks for begin, end, _ in row)
        return 1 - busy / (len(self.ranks) * self.span) if self.span else 0.0


def simulate(program: Program, costs: Costs, steps: int = 3) -> ScheduleTiming:
    """Run the program on paper `steps` times in a row. It must be one that `verify` accepts.

    Each rank runs its row in order; an action starts when the rank is free and its input has arrived. The period is that of the
    last step.
    Cost: a dictionary entry an action and step.
    """
    rows = [[a for a in row if a.op.computes] for row in program.ranks]
    owner, last = program.owners(), program.stages - 1
    clocks = [0.0] * len(rows)
    spans: list[tuple[Span, ...]] = []
    ends = [0.0]
    for step in range(max(1, steps)):
        timed = _one_step(rows, clocks, costs, (owner, last))
        ends.append(max(clocks, default=0.0))
        if step == 0:
            spans = timed
    return ScheduleTiming(tuple(spans), ends[1], ends[-1] - ends[-2])


def _one_step(
    rows: list[list[Action]], clocks: list[float], costs: Costs, where: tuple[dict[int, int], int]
) -> list[tuple[Span, ...]]:
    owner, last = where
    done: dict[tuple[bool, int, int], float] = {}  # (forward?, stage, microbatch) -> when its output exists
    at, spans = [0] * len(rows), [list[Span]() for _ in rows]
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                action = row[at[r]]
                needed = _input_of(action, last)
                begin = clocks[r]
                if needed is not None:
                    if needed not in done:
                        break
                    away = owner[needed[1]] != r
                    begin = max(begin, done[needed] + (costs.transfer if away else 0.0))
                end = clocks[r] = begin + costs.of(action.op, action.stage)
                if action.op is not ActionKind.WEIGHT_GRAD:
                    done[action.op is ActionKind.FORWARD, action.stage, action.microbatch] = end
                spans[r].append((begin, end, action))
                at[r] += 1
                moved = True
    return [tuple(row) for row in spans]


def _input_of(action: Action, last: int) -> tuple[bool, int, int] | None:
    """Return the result for which an action waits: (forward, stage, microbatch), or None."""
    s, m = action.stage, action.microbatch
    if action.op is ActionKind.FORWARD:
        return (True, s - 1, m) if s else None
    if action.op is ActionKind.WEIGHT_GRAD:
        return (False, s, m)
    return (False, s + 1, m) if s < last else (True, s, m)
