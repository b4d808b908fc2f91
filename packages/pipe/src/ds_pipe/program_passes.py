"""Passes: program in, program out. Each adds one concern, so that schedules stay a handful of lines."""

from __future__ import annotations

from dataclasses import replace

from ds_pipe.actions import Action, ActionKind, Program

__all__ = ["add_comms", "add_gathers", "add_reduces", "mark_reduce"]


def mark_reduce(program: Program, every_backward: bool) -> Program:
    """Mark the backwards at which a stage's gradients are reduced over the data-parallel ranks.

    Args:
        every_backward: True reduces after each backward, so that no rank stores full gradients between microbatches
            (sharded gradients: ZeRO stages 2 and 3). False reduces once, after the last backward of each stage
            (full gradients are stored: stages 0 and 1), which sends 1/microbatches of the bytes.
    """
    return Program(tuple(_mark_row(actions, every_backward) for actions in program.ranks))


def _mark_row(actions: tuple[Action, ...], every_backward: bool) -> tuple[Action, ...]:
    last = {action.stage: i for i, action in enumerate(actions) if action.op.differentiates}
    return tuple(
        replace(action, reduce=every_backward or last[action.stage] == i) if action.op.differentiates else action
        for i, action in enumerate(actions)
    )


def add_reduces(program: Program) -> Program:
    """Turn every mark `*` into an action of its own after the backward, for runners that reduce apart from autograd."""

    def after(action: Action) -> tuple[Action, ...]:
        if not action.reduce:
            return (action,)
        return (replace(action, reduce=False), Action(ActionKind.REDUCE, action.stage, action.microbatch))

    return Program(tuple(tuple(cell for action in actions for cell in after(action)) for actions in program.ranks))


def add_gathers(program: Program, ahead: int = 1) -> Program:
    """Add the actions that all-gather and free the parameters of each stage (ZeRO stage 3 by the program).

    A stage is all-gathered `ahead` actions of the rank before its first use after a pause, and freed after the last use
    before a pause. A rank with one stage gathers once and frees once; with several, one stage at a time (and the next).
    """
    return Program(tuple(_gather_row(actions, ahead) for actions in program.ranks))


def _gather_row(actions: tuple[Action, ...], ahead: int) -> tuple[Action, ...]:
    uses = [i for i, action in enumerate(actions) if action.op.computes]
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    for n, i in enumerate(uses):
        stage, microbatch = actions[i].stage, actions[i].microbatch
        if n == 0 or actions[uses[n - 1]].stage != stage:
            # Not before the action that gives the stage back: with short runs that one may be among the last `ahead`.
            previous_use = next((k for k in range(n - 1, -1, -1) if actions[uses[k]].stage == stage), -1)
            before.setdefault(uses[max(n - ahead, previous_use + 1, 0)], []).append(
                Action(ActionKind.GATHER, stage, microbatch)
            )
        if n + 1 == len(uses) or actions[uses[n + 1]].stage != stage:
            after.setdefault(i, []).append(Action(ActionKind.RELEASE, stage, microbatch))
    return tuple(c for i, action in enumerate(actions) for c in (*before.get(i, ()), action, *after.get(i, ())))


def add_comms(program: Program) -> Program:
    """Put a receive before each forward and backward, and a send after it, where the neighbour stage is on another rank.

    Neighbour stages on the same rank hand tensors over without an action. A weight gradient has nothing to send. A one-stage
    program is unchanged.
    """
    owner = program.owners()
    last = program.stages - 1

    def away(stage: int, neighbour: int) -> bool:
        return 0 <= neighbour <= last and owner.get(neighbour) != owner[stage]

    def around(action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        if not action.op.computes or action.op is ActionKind.WEIGHT_GRAD:
            return (action,)
        forward = action.op is ActionKind.FORWARD
        source, target = (s - 1, s + 1) if forward else (s + 1, s - 1)
        before = (Action(ActionKind.RECV_F if forward else ActionKind.RECV_B, s, m),) if away(s, source) else ()
        after = (Action(ActionKind.SEND_F if forward else ActionKind.SEND_B, s, m),) if away(s, target) else ()
        return (*before, action, *after)

    return Program(tuple(tuple(cell for action in actions for cell in around(action)) for actions in program.ranks))
