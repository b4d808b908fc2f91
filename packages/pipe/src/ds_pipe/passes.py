"""Passes: program in, program out. Each adds one concern, so that schedules stay a handful of lines."""

from __future__ import annotations

from dataclasses import replace

from ds_pipe.actions import Action, Op, Program

__all__ = ["add_comms", "mark_reduce"]


def mark_reduce(program: Program, every_backward: bool) -> Program:
    """Say at which backwards a stage's gradients are reduced over the data-parallel ranks.

    Args:
        every_backward: True reduces after each backward, so that no rank keeps whole gradients between microbatches
            (sharded gradients: ZeRO stages 2 and 3). False reduces once, after the last backward of each stage
            (whole gradients are kept: stages 0 and 1), which sends 1/microbatches of the bytes.
    """
    return Program(tuple(_mark_row(actions, every_backward) for actions in program.ranks))


def _mark_row(actions: tuple[Action, ...], every_backward: bool) -> tuple[Action, ...]:
    last = {action.stage: i for i, action in enumerate(actions) if action.op is Op.BACKWARD}
    return tuple(
        replace(action, reduce=every_backward or last[action.stage] == i) if action.op is Op.BACKWARD else action
        for i, action in enumerate(actions)
    )


def add_comms(program: Program) -> Program:
    """Put a receive before each forward and backward, and a send after it, where the neighbour stage is on another rank.

    Neighbour stages on the same rank hand tensors over without an action. A one-stage program is unchanged.
    """
    owner = program.owners()
    last = program.stages - 1

    def away(stage: int, neighbour: int) -> bool:
        return 0 <= neighbour <= last and owner.get(neighbour) != owner[stage]

    def around(action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        if not action.op.computes:
            return (action,)
        forward = action.op is Op.FORWARD
        source, target = (s - 1, s + 1) if forward else (s + 1, s - 1)
        before = (Action(Op.RECV_F if forward else Op.RECV_B, s, m),) if away(s, source) else ()
        after = (Action(Op.SEND_F if forward else Op.SEND_B, s, m),) if away(s, target) else ()
        return (*before, action, *after)

    return Program(tuple(tuple(cell for action in actions for cell in around(action)) for actions in program.ranks))
