"""Simulate a program: check that it ends, that every input is there when it is used, and count what it costs.

Words: an action is *ready* when what it needs exists; a program *deadlocks* when no rank's next action is ready; the
*span* is the time of the slowest rank; the *bubble* is the share of the ranks' time in which they wait; *live
activations* are forwards whose backward has not ended yet, weight gradients included.

Sends never wait (they are buffered); a receive waits for its send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_config.errors import PlanError
from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs
from ds_pipe.schedule_timing import simulate

__all__ = ["ScheduleError", "ScheduleReport", "verify"]

_GRID_BEFORE, _GRID_AFTER = 6, 2  # cells shown around the failing one: enough to see what led to it


class ScheduleError(PlanError):
    """A program that cannot run, or that would compute something else than the plain loop; shows the failing cell."""


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """What a program costs, in the units of its `Costs`.

    Attributes:
        span: Time until the last rank is done.
        bubble: Share of all ranks' time spent waiting, 0 to 1.
        peak_activations: Per rank, the largest number of microbatch activations alive at once.
        sends: Number of messages between ranks.
        reductions: Per stage, how many times its gradients are reduced.
        period: Time from one step to the next when no rank waits for all others between steps.
        peak_memory: Per rank, the most activation memory held at once, by `Costs.activation`.
    """

    span: float
    bubble: float
    peak_activations: tuple[int, ...]
    sends: int
    reductions: tuple[int, ...]
    period: float
    peak_memory: tuple[float, ...]


@dataclass(slots=True)
class _SimulatedRank:
    """Where one rank stands."""

    at: int = 0
    live: int = 0
    peak: int = 0
    live_activations: float = 0.0
    peak_held: float = 0.0
    gathered: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Paper:
    """The state of the simulation."""

    program: Program
    costs: Costs
    caps: tuple[float, ...] | None
    owner: dict[int, int]
    stages: int
    ranks: list[_SimulatedRank]
    done: set[Action] = field(default_factory=set)  # every finished action, without its mark
    splits: set[Action] = field(default_factory=set)  # input gradients of the program
    sends: int = 0
    trains: bool = False
    gathers: bool = False


def verify(program: Program, costs: Costs | None = None, caps: Sequence[float] | None = None) -> ScheduleReport:
    """Simulate `program` and report its cost.

    Every forward must have exactly one backward, whole or split (or none in the whole program: evaluation); inputs must
    arrive before they are used, by a transfer or on the same rank; every send must be received; when any backward reduces,
    the last weight gradient of every stage must, or gradients would be lost; a program with gathers uses no stage that is
    not gathered.

    Args:
        costs: Times and memory of every stage; all alike when left out.
        caps: Activation memory that each rank may hold.
    Raises:
        ScheduleError: "program-order" (an action before its input, twice, or never), "program-deadlock" (no rank can
            go on), "program-reduce" (gradients of a stage would not be reduced), "program-cap" (a rank holds too much).
            All show the program around the cell.
    Cost: one set entry or two per action; 512 actions in about 10 ms.
    """
    ops = {action.op for actions in program.ranks for action in actions}
    costs = costs or Costs.even(program.stages)
    if costs.stages < program.stages:
        raise PlanError(
            f"the program has {program.stages} stages, costs were given for {costs.stages}",
            code="program-costs",
            fix="Give one number a stage.",
        )
    paper = _Paper(
        program,
        costs,
        None if caps is None else tuple(caps),
        program.owners(),
        program.stages,
        [_SimulatedRank() for _ in program.ranks],
    )
    paper.splits = {a for actions in program.ranks for a in actions if a.op is ActionKind.INPUT_GRAD}
    paper.trains, paper.gathers = (
        bool(ops & {ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}),
        ActionKind.GATHER in ops,
    )
    while any(rank.at < len(actions) for rank, actions in zip(paper.ranks, program.ranks, strict=True)):
        moved = [_advance(paper, r) for r in range(len(program.ranks))]
        if not any(moved):
            raise _deadlock(paper)
    _check_complete(paper)
    reductions = _check_reductions(paper)
    timing = simulate(program, costs)
    ranks = paper.ranks
    return ScheduleReport(
        span=timing.span,
        bubble=timing.bubble,
        peak_activations=tuple(rank.peak for rank in ranks),
        sends=paper.sends,
        reductions=reductions,
        period=timing.period,
        peak_memory=tuple(rank.peak_held for rank in ranks),
    )


def _advance(paper: _Paper, r: int) -> bool:
    """Run rank r until it waits; whether it ran anything."""
    rank, actions, start = paper.ranks[r], paper.program.ranks[r], paper.ranks[r].at
    while rank.at < len(actions):
        action = actions[rank.at]
        bare = Action(action.op, action.stage, action.microbatch)
        if bare in paper.done and action.op not in (ActionKind.GATHER, ActionKind.RELEASE, ActionKind.REDUCE):
            raise _order(paper, r, f"{action} comes twice")
        if action.op in (ActionKind.RECV_F, ActionKind.RECV_B):
            if _sender(action) not in paper.done:
                break
        elif action.op in (ActionKind.SEND_F, ActionKind.SEND_B):
            _need(paper, r, action, _result(paper, action.op is ActionKind.SEND_F, action.stage, action.microbatch))
            paper.sends += 1
        elif action.op is ActionKind.GATHER:
            if action.stage in rank.gathered:
                raise _order(paper, r, f"{action} gathers what is gathered")
            rank.gathered.add(action.stage)
        elif action.op is ActionKind.RELEASE:
            if action.stage not in rank.gathered:
                raise _order(paper, r, f"{action} gives back what is not gathered")
            rank.gathered.discard(action.stage)
        elif action.op.computes:
            _compute(paper, r, action)
        paper.done.add(bare)
        rank.at += 1
    return rank.at > start


def _compute(paper: _Paper, r: int, action: Action) -> None:
    rank, s, m = paper.ranks[r], action.stage, action.microbatch
    if paper.gathers and s not in rank.gathered:
        raise _order(paper, r, f"{action} uses stage {s}, which is not gathered")
    forward = action.op is ActionKind.FORWARD
    if not forward:
        _need(paper, r, action, Action(ActionKind.FORWARD, s, m))
    if action.op is ActionKind.WEIGHT_GRAD:
        _need(paper, r, action, Action(ActionKind.INPUT_GRAD, s, m))
    else:
        if not forward and _other_backward(action) in paper.done:
            raise _order(paper, r, f"{action} and {_other_backward(action)} are the same backward")
        source = s - 1 if forward else s + 1
        if 0 <= source < paper.stages:
            here = paper.owner.get(source) == r
            receive = ActionKind.RECV_F if forward else ActionKind.RECV_B
            _need(paper, r, action, _result(paper, forward, source, m) if here else Action(receive, s, m))
    if forward:
        rank.live += 1
        rank.live_activations += paper.costs.activation[s]
    elif action.op.differentiates:
        rank.live -= 1
        rank.live_activations -= paper.costs.activation[s]
    rank.peak, rank.peak_held = max(rank.peak, rank.live), max(rank.peak_held, rank.live_activations)
    if paper.caps is not None and rank.live_activations > paper.caps[r] * (1 + 1e-9):
        raise ScheduleError(
            f"rank {r} may hold {paper.caps[r]:g} of activations and holds {rank.live_activations:g} after {action}:\n"
            f"{_grid(paper.program, r, rank.at)}",
            code="program-cap",
            fix="Raise the cap, or make the program with it (ds_pipe.list_scheduled).",
        )


def _result(paper: _Paper, forward: bool, stage: int, microbatch: int) -> Action:
    """Return the action whose result an adjacent stage waits for."""
    if forward:
        return Action(ActionKind.FORWARD, stage, microbatch)
    split = Action(ActionKind.INPUT_GRAD, stage, microbatch)
    return split if split in paper.splits else Action(ActionKind.BACKWARD, stage, microbatch)


def _other_backward(action: Action) -> Action:
    return Action(
        ActionKind.INPUT_GRAD if action.op is ActionKind.BACKWARD else ActionKind.BACKWARD,
        action.stage,
        action.microbatch,
    )


def _sender(receive: Action) -> Action:
    if receive.op is ActionKind.RECV_F:
        if receive.stage == 0:
            return receive  # nobody sends to the first stage: never in `done`, so it shows as a deadlock
        return Action(ActionKind.SEND_F, receive.stage - 1, receive.microbatch)
    return Action(ActionKind.SEND_B, receive.stage + 1, receive.microbatch)


def _need(paper: _Paper, r: int, action: Action, needed: Action) -> None:
    if needed not in paper.done:
        raise _order(paper, r, f"{action} comes before {needed}, which it needs")


def _check_complete(paper: _Paper) -> None:
    for r, actions in enumerate(paper.program.ranks):
        for i, action in enumerate(actions):
            s, m = action.stage, action.microbatch
            if (
                action.op is ActionKind.FORWARD
                and paper.trains
                and not paper.done & {Action(ActionKind.BACKWARD, s, m), Action(ActionKind.INPUT_GRAD, s, m)}
            ):
                raise _order(paper, r, f"{action} has no backward", i)
            if action.op is ActionKind.INPUT_GRAD and Action(ActionKind.WEIGHT_GRAD, s, m) not in paper.done:
                raise _order(paper, r, f"{action} has no weight gradient", i)
            if action.op is ActionKind.SEND_F and Action(ActionKind.RECV_F, s + 1, m) not in paper.done:
                raise _order(paper, r, f"{action} is received by no one", i)
            if action.op is ActionKind.SEND_B and (s == 0 or Action(ActionKind.RECV_B, s - 1, m) not in paper.done):
                raise _order(paper, r, f"{action} is received by no one", i)
    for s in range(paper.program.stages):
        missing = [m for m in range(paper.program.microbatches) if Action(ActionKind.FORWARD, s, m) not in paper.done]
        if missing:
            raise ScheduleError(
                f"stage {s} never runs the forward of microbatch {missing[0]}:\n{paper.program}",
                code="program-order",
                fix="Run every microbatch on every stage.",
            )


def _check_reductions(paper: _Paper) -> tuple[int, ...]:
    count = [0] * paper.program.stages
    last: dict[int, tuple[int, int]] = {}
    closed: set[int] = set()
    for r, actions in enumerate(paper.program.ranks):
        for i, action in enumerate(actions):
            if action.op.differentiates:
                count[action.stage] += action.reduce
                last[action.stage] = (r, i)
                closed.discard(action.stage)
            elif action.op is ActionKind.REDUCE:
                count[action.stage] += 1
                closed.add(action.stage)
    if any(count):
        for stage, (r, i) in last.items():
            if stage not in closed and not paper.program.ranks[r][i].reduce:
                raise ScheduleError(
                    f"stage {stage} ends with gradients that are not reduced:\n{_grid(paper.program, r, i)}",
                    code="program-reduce",
                    fix="Mark the last backward of every stage (ds_pipe.mark_reduce does).",
                )
    return tuple(count)


def _order(paper: _Paper, r: int, what: str, at: int | None = None) -> ScheduleError:
    cell = paper.ranks[r].at if at is None else at
    return ScheduleError(
        f"rank {r}: {what}:\n{_grid(paper.program, r, cell)}",
        code="program-order",
        fix="Reorder the schedule, or add transfers with ds_pipe.add_comms.",
    )


def _deadlock(paper: _Paper) -> ScheduleError:
    waits = [
        (r, paper.ranks[r].at) for r, actions in enumerate(paper.program.ranks) if paper.ranks[r].at < len(actions)
    ]
    lines = [
        f"rank {r} waits at {paper.program.ranks[r][at]} for {_sender(paper.program.ranks[r][at])}" for r, at in waits
    ]
    r, at = waits[0]
    return ScheduleError(
        "the program stops, no rank can go on:\n  " + "\n  ".join(lines) + f"\n{_grid(paper.program, r, at)}",
        code="program-deadlock",
        fix="Send before you wait, in the same order on both sides.",
    )


def _grid(program: Program, rank: int, cell: int) -> str:
    """Format the program around a cell, ranks as rows, the cell in [brackets]."""
    start = max(0, cell - _GRID_BEFORE)
    rows = []
    for r, actions in enumerate(program.ranks):
        shown = [
            f"[{action}]" if (r, start + i) == (rank, cell) else f" {action} "
            for i, action in enumerate(actions[start : cell + _GRID_AFTER + 1])
        ]
        rows.append(f"  rank {r}: {'... ' if start else ''}" + "".join(f"{text:<10}" for text in shown).rstrip())
    return "\n".join(rows)
