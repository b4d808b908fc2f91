"""Run a program on paper: prove that it ends, that every input is there when it is used, and count what it costs.

Words: an action is *ready* when what it needs exists; a program *deadlocks* when no rank's next action is ready; the
*span* is the time of the slowest rank; the *bubble* is the share of the ranks' time in which they wait; *live
activations* are forwards whose backward has not run yet.

Sends never wait (they are buffered); a receive waits for its send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_config.errors import PlanError
from ds_pipe.actions import Action, Op, Program

__all__ = ["Report", "ScheduleError", "verify"]

_COST: Mapping[Op, float] = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
_GRID_BEFORE, _GRID_AFTER = 6, 2  # cells shown around the failing one: enough to see what led to it


class ScheduleError(PlanError):
    """A program that cannot run, or that would compute something else than the plain loop; shows the failing cell."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a program costs, in units where a forward of one stage takes `cost[FORWARD]`.

    Attributes:
        span: Time until the last rank is done.
        bubble: Share of all ranks' time spent waiting, 0 to 1.
        peak_activations: Per rank, the largest number of microbatch activations alive at once.
        sends: Number of messages between ranks.
        reductions: Per stage, how many times its gradients are reduced.
    """

    span: float
    bubble: float
    peak_activations: tuple[int, ...]
    sends: int
    reductions: tuple[int, ...]


@dataclass(slots=True)
class _Rank:
    """Where one rank stands."""

    at: int = 0
    clock: float = 0.0
    busy: float = 0.0
    live: int = 0
    peak: int = 0


@dataclass(slots=True)
class _Paper:
    """The state of the simulation."""

    program: Program
    cost: Mapping[Op, float]
    owner: Mapping[int, int]
    ranks: list[_Rank]
    done: dict[Action, float] = field(default_factory=dict)  # every finished action, without its mark, and when
    sends: int = 0

    @property
    def trains(self) -> bool:
        return any(action.op is Op.BACKWARD for actions in self.program.ranks for action in actions)


def verify(program: Program, cost: Mapping[Op, float] = _COST) -> Report:
    """Simulate `program` and report its cost.

    Every forward must have exactly one backward (or none in the whole program: evaluation); inputs must arrive before
    they are used, by a transfer or on the same rank; every send must be received; when any backward reduces, the last
    backward of every stage must, or gradients would be lost.

    Args:
        cost: Time of a forward and of a backward of one stage. Transfers are free.
    Raises:
        ScheduleError: "program-order" (an action before its input, twice, or never), "program-deadlock" (no rank can
            go on), "program-reduce" (gradients of a stage would not be reduced). All show the program around the cell.
    Cost: one dictionary lookup or two per action; 512 actions in well under 10 ms.
    """
    paper = _Paper(program, cost, program.owners(), [_Rank() for _ in program.ranks])
    while any(rank.at < len(actions) for rank, actions in zip(paper.ranks, program.ranks, strict=True)):
        moved = [_advance(paper, r) for r in range(len(program.ranks))]
        if not any(moved):
            raise _deadlock(paper)
    _check_complete(paper)
    reductions = _check_reductions(paper)
    span = max((rank.clock for rank in paper.ranks), default=0.0)
    busy = sum(rank.busy for rank in paper.ranks)
    bubble = 1 - busy / (len(paper.ranks) * span) if span else 0.0
    return Report(span, bubble, tuple(rank.peak for rank in paper.ranks), paper.sends, reductions)


def _advance(paper: _Paper, r: int) -> bool:
    """Run rank r until it waits; whether it ran anything."""
    rank, actions, start = paper.ranks[r], paper.program.ranks[r], paper.ranks[r].at
    while rank.at < len(actions):
        action = actions[rank.at]
        bare = Action(action.op, action.stage, action.microbatch)
        if bare in paper.done:
            raise _order(paper, r, f"{action} comes twice")
        if action.op in (Op.RECV_F, Op.RECV_B):
            sender = _sender(action)
            if sender not in paper.done:
                break
            rank.clock = max(rank.clock, paper.done[sender])
        elif action.op in (Op.SEND_F, Op.SEND_B):
            _need(
                paper,
                r,
                action,
                Action(Op.FORWARD if action.op is Op.SEND_F else Op.BACKWARD, action.stage, action.microbatch),
            )
            paper.sends += 1
        else:
            _compute(paper, r, action)
        paper.done[bare] = rank.clock
        rank.at += 1
    return rank.at > start


def _compute(paper: _Paper, r: int, action: Action) -> None:
    rank, s, m = paper.ranks[r], action.stage, action.microbatch
    forward = action.op is Op.FORWARD
    if not forward:
        _need(paper, r, action, Action(Op.FORWARD, s, m))
    source = s - 1 if forward else s + 1
    if 0 <= source < paper.program.stages:
        here = paper.owner.get(source) == r
        receive = Op.RECV_F if forward else Op.RECV_B
        _need(paper, r, action, Action(action.op, source, m) if here else Action(receive, s, m))
    rank.clock += paper.cost[action.op]
    rank.busy += paper.cost[action.op]
    rank.live += 1 if forward else -1
    rank.peak = max(rank.peak, rank.live)


def _sender(receive: Action) -> Action:
    if receive.op is Op.RECV_F:
        if receive.stage == 0:
            return receive  # nobody sends to the first stage: never in `done`, so it shows as a deadlock
        return Action(Op.SEND_F, receive.stage - 1, receive.microbatch)
    return Action(Op.SEND_B, receive.stage + 1, receive.microbatch)


def _need(paper: _Paper, r: int, action: Action, needed: Action) -> None:
    if needed not in paper.done:
        raise _order(paper, r, f"{action} comes before {needed}, which it needs")


def _check_complete(paper: _Paper) -> None:
    for r, actions in enumerate(paper.program.ranks):
        for i, action in enumerate(actions):
            s, m = action.stage, action.microbatch
            if action.op is Op.FORWARD and paper.trains and Action(Op.BACKWARD, s, m) not in paper.done:
                raise _order(paper, r, f"{action} has no backward", i)
            if action.op is Op.SEND_F and Action(Op.RECV_F, s + 1, m) not in paper.done:
                raise _order(paper, r, f"{action} is received by no one", i)
            if action.op is Op.SEND_B and (s == 0 or Action(Op.RECV_B, s - 1, m) not in paper.done):
                raise _order(paper, r, f"{action} is received by no one", i)
    for s in range(paper.program.stages):
        missing = [m for m in range(paper.program.microbatches) if Action(Op.FORWARD, s, m) not in paper.done]
        if missing:
            raise ScheduleError(
                f"stage {s} never runs the forward of microbatch {missing[0]}:\n{paper.program}",
                code="program-order",
                fix="Run every microbatch on every stage.",
            )


def _check_reductions(paper: _Paper) -> tuple[int, ...]:
    count = [0] * paper.program.stages
    last: dict[int, tuple[int, int]] = {}
    for r, actions in enumerate(paper.program.ranks):
        for i, action in enumerate(actions):
            if action.op is Op.BACKWARD:
                count[action.stage] += action.reduce
                last[action.stage] = (r, i)
    if any(count):
        for stage, (r, i) in last.items():
            if not paper.program.ranks[r][i].reduce:
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
    """The program around a cell, ranks as rows, the cell in [brackets]."""
    start = max(0, cell - _GRID_BEFORE)
    rows = []
    for r, actions in enumerate(program.ranks):
        shown = [
            f"[{action}]" if (r, start + i) == (rank, cell) else f" {action} "
            for i, action in enumerate(actions[start : cell + _GRID_AFTER + 1])
        ]
        rows.append(f"  rank {r}: {'... ' if start else ''}" + "".join(f"{text:<10}" for text in shown).rstrip())
    return "\n".join(rows)
