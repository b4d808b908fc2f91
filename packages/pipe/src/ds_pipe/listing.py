"""The generator of all training schedules: list scheduling under a memory cap. Pure; no torch.

Time runs over a heap of moments at which a rank may have something to do. A rank that is free takes, of the actions that
could start now, the one that its `SchedulePriority` prefers; it never waits while it has something it may do, except where the rule says
so. What may start: a forward whose input is there and whose activation fits, an input gradient whose output gradient is
there, any weight gradient that is left. The named schedules (`programs.py`) are rules, placements and caps of this one.

Note "a forward leaves memory". A rank with several stages could fill its memory with activations of its first one, and then never
run the later stages that would free them. So a forward is taken only if, after it, one microbatch still fits in all
later stages of the rank. With that the most advanced microbatch can always go on: were its forward blocked on a rank, every
activation there would be of an earlier stage of the rank, and the last of those was taken with memory left for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ds_config.errors import PlanError
from ds_pipe.actions import Action, ActionKind, Program
from ds_pipe.costs import Costs

__all__ = ["SchedulePriority", "ScheduleProblem", "generate"]


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """What is to be scheduled.

    Attributes:
        rank_of: The rank of every stage.
        microbatches: Of one step.
        costs: Time and memory of every stage.
        cap: Activation memory that each rank may hold, in the unit of `costs.activation`; infinity for no limit.
        ahead: Forwards that each rank should be ahead of its input gradients at most, over all its stages; empty for no limit. A
            wish: it is dropped at the moment where nothing could go on with it.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    costs: Costs
    cap: tuple[float, ...]
    ahead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for rank, cap in enumerate(self.cap):
            needed = sum(self.costs.activation[s] for s, r in enumerate(self.rank_of) if r == rank)
            if needed > cap:
                raise PlanError(
                    f"rank {rank} may hold {cap:g} of activations, and one microbatch in its stages is {needed:g}",
                    code="program-cap",
                    fix="Raise the cap, cut the model into more stages, or use smaller microbatches.",
                )

    @property
    def ranks(self) -> int:
        return len(self.cap)


@dataclass(frozen=True, slots=True)
class SchedulePriority:
    """What a rank prefers to do next.

    Attributes:
        split: Whether backwards are two actions: never, always, or only once a rank has no forwards left.
        flush: No backward before all forwards of the rank are done.
        pair: After a backward a forward comes first if there is one; else input gradients always come first.
        grouped: Forwards of so many microbatches go through a stage of the rank before its next one, and input
            gradients likewise from the last one; 0: later stages first.
        patience: A weight gradient is not begun if an input gradient arrives within this part of its time.
    """

    split: Literal["never", "always", "end"] = "never"
    flush: bool = False
    pair: bool = False
    grouped: int = 0
    patience: float = 0.0


@dataclass(slots=True)
class _ListedRank:
    stages: list[int]
    row: list[Action] = field(default_factory=list)
    free_at: float = 0.0
    live_activations: float = 0.0
    left: int = 0  # forwards to come
    ahead: int = 0  # forwards whose input gradient is to come
    weights: deque[tuple[int, int]] = field(default_factory=deque)  # (stage, microbatch) whose weight gradient is left
    after_backward: bool = False


class _Simulation:
    """One run of the generator. Per stage, microbatches are taken in order, so a queue of arrival times is all there is."""

    def __init__(self, problem: ScheduleProblem, rule: SchedulePriority) -> None:
        stages, self.problem, self.rule, self.ahead = len(problem.rank_of), problem, rule, problem.ahead
        self.ranks = [
            _ListedRank([s for s, r in enumerate(problem.rank_of) if r == rank]) for rank in range(problem.ranks)
        ]
        for rank in self.ranks:
            rank.left = len(rank.stages) * problem.microbatches
        self.forwards: list[deque[float]] = [deque() for _ in range(stages)]  # when the next inputs are there
        self.gradients: list[deque[float]] = [
            deque() for _ in range(stages)
        ]  # when the next output gradients are there
        self.next_forward, self.next_backward = [0] * stages, [0] * stages
        self.room = self._room_after()
        self.forwards[0].extend([0.0] * problem.microbatches)
        self.moments = [(0.0, problem.rank_of[0])]

    def _room_after(self) -> list[float]:
        """Compute, per stage, the memory of a microbatch in later stages of the same rank.

        See "a forward leaves memory".
        """
        rank_of, memory = self.problem.rank_of, self.problem.costs.activation
        return [
            sum(memory[t] for t in range(s + 1, len(rank_of)) if rank_of[t] == rank_of[s]) for s in range(len(rank_of))
        ]

    def run(self) -> Program:
        self._until_nothing_goes_on()
        if any(rank.left for rank in self.ranks):
            self.ahead = ()
            # By then whatever was sent has arrived.
            now = max(rank.free_at for rank in self.ranks) + self.problem.costs.transfer
            self.moments = [(now, number) for number in range(len(self.ranks))]
            self._until_nothing_goes_on()
        return Program(tuple(tuple(rank.row) for rank in self.ranks))

    def _until_nothing_goes_on(self) -> None:
        while self.moments:
            now, number = heapq.heappop(self.moments)
            rank = self.ranks[number]
            if rank.free_at <= now and (action := self._choose(rank, number, now)) is not None:
                self._take(rank, number, action, now)

    # ---- which

    def _choose(self, rank: _ListedRank, number: int, now: float) -> Action | None:
        forward, backward = self._forward(rank, number, now), self._backward(rank, now)
        if forward is not None and backward is not None:
            return forward if self.rule.pair and rank.after_backward else backward
        if forward is not None or backward is not None:
            return forward or backward
        if not rank.weights:
            return None
        stage, microbatch = rank.weights[0]
        patience = self.rule.patience * self.problem.costs.weight_grad[stage]
        if patience and any(now < queue[0] <= now + patience for s in rank.stages if (queue := self.gradients[s])):
            return None
        return Action(ActionKind.WEIGHT_GRAD, stage, microbatch)

    def _forward(self, rank: _ListedRank, number: int, now: float) -> Action | None:
        problem, memory, group = self.problem, self.problem.costs.activation, self.rule.grouped
        if not rank.left or (self.ahead and rank.ahead >= self.ahead[number]):
            return None
        most = problem.cap[number] * (1 + 1e-12) - rank.live_activations
        ready = [
            s
            for s in rank.stages
            if self.forwards[s] and self.forwards[s][0] <= now and memory[s] + self.room[s] <= most
        ]
        if not ready:
            return None
        stage = min(ready, key=lambda s: (self.next_forward[s] // group, s)) if group else max(ready)
        return Action(ActionKind.FORWARD, stage, self.next_forward[stage])

    def _backward(self, rank: _ListedRank, now: float) -> Action | None:
        if self.rule.flush and rank.left:
            return None
        group = self.rule.grouped
        ready = [s for s in rank.stages if self.gradients[s] and self.gradients[s][0] <= now]
        if not ready:
            return None
        stage = min(ready, key=lambda s: (self.next_backward[s] // group, -s)) if group else min(ready)
        split = self.rule.split == "always" or (self.rule.split == "end" and not rank.left)
        return Action(ActionKind.INPUT_GRAD if split else ActionKind.BACKWARD, stage, self.next_backward[stage])

    # ---- then

    def _take(self, rank: _ListedRank, number: int, action: Action, now: float) -> None:
        costs, stage = self.problem.costs, action.stage
        end = rank.free_at = now + costs.of(action.op, stage)
        rank.row.append(action)
        if action.op is ActionKind.FORWARD:
            rank.live_activations += costs.activation[stage]
            rank.left -= 1
            rank.ahead += 1
            self.next_forward[stage] += 1
            self.forwards[stage].popleft()
            last = stage + 1 == len(self.problem.rank_of)
            self._arrive(
                self.gradients[stage] if last else self.forwards[stage + 1], stage, stage if last else stage + 1, end
            )
        elif action.op is ActionKind.WEIGHT_GRAD:
            rank.weights.popleft()
        else:
            rank.ahead -= 1
            self.next_backward[stage] += 1
            self.gradients[stage].popleft()
            if action.op is ActionKind.INPUT_GRAD:
                rank.weights.append((stage, action.microbatch))
            if stage:
                self._arrive(self.gradients[stage - 1], stage, stage - 1, end)
        if action.op.differentiates:
            rank.live_activations -= costs.activation[stage]
        rank.after_backward = action.op in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
        heapq.heappush(self.moments, (end, number))

    def _arrive(self, queue: deque[float], source: int, target: int, end: float) -> None:
        there, here = self.problem.rank_of[target], self.problem.rank_of[source]
        when = end if there == here else end + self.problem.costs.transfer
        queue.append(when)
        heapq.heappush(self.moments, (when, there))


def generate(problem: ScheduleProblem, rule: SchedulePriority) -> Program:
    """Generate the program of `problem` by list scheduling under `rule`.

    A program always exists: see "a forward leaves memory".

    Cost: one to three heap entries per action; 1,000 actions in about 5 ms.
    """
    return _Simulation(problem, rule).run()
