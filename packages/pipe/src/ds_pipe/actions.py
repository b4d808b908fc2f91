"""What one rank does in one step, as data: actions with a text form, and programs made of them. No torch.

Words: a *stage* is a consecutive part of the model (a model that is not cut is one stage, number 0); a *microbatch* is
one forward and one backward's worth of samples; an *action* is one of the two, or a transfer between two stages; a
*program* is the list of actions of every rank, in the order each rank runs them. A backward may be *split*: its input
gradient is what the stage before waits for, its weight gradient is needed only by the update and can fill a wait.

Text form of an action: stage, operation, microbatch, then `*` when the stage's gradients are reduced as it ends.

    0F3         stage 0 runs the forward of microbatch 3
    0B3*        stage 0 runs the whole backward of microbatch 3, and gradients are reduced when it ends
    0I3         stage 0 computes the gradient of its input of microbatch 3
    0W3*        stage 0 computes the gradients of its weights from microbatch 3, and reduces when it ends
    1SEND_F3    stage 1 sends the output of its forward of microbatch 3 to stage 2
    2RECV_F3    stage 2 receives it
    2SEND_B3    stage 2 sends the gradient of that input back to stage 1
    1RECV_B3    stage 1 receives it
    0GATHER3    the parameters of stage 0 are brought together, before microbatch 3 needs them
    0RELEASE3   they are given back after microbatch 3
    0REDUCE3    the gradients of stage 0 are reduced, after microbatch 3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ds_config.errors import PlanError

__all__ = ["Action", "ActionKind", "Program"]


class ActionKind(Enum):
    """What an action does. Transfers name the pass they belong to: forward sends activations, backward gradients."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"

    @property
    def computes(self) -> bool:
        """Whether the action runs the model (the others move tensors between ranks)."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)

    @property
    def differentiates(self) -> bool:
        """Whether the action adds to the gradients of weights, so that they can be reduced when it ends."""
        return self in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


_ACTION = re.compile(
    r"(?P<stage>\d+)(?P<op>F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|GATHER|RELEASE|REDUCE)(?P<microbatch>\d+)(?P<reduce>\*?)"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a program.

    Attributes:
        op: What is done.
        stage: The stage it is done by (for a transfer: the stage that sends, or the stage that receives).
        microbatch: Which microbatch, counted from 0 within the step.
        reduce: Only on a backward or weight gradient: the stage's gradients are reduced over the data-parallel ranks when it ends.
    """

    op: ActionKind
    stage: int
    microbatch: int
    reduce: bool = False

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0 or (self.reduce and not self.op.differentiates):
            raise PlanError(
                f"an action needs stage >= 0, microbatch >= 0, and reduces only on a backward: "
                f"got {self.op.name}, stage {self.stage}, microbatch {self.microbatch}, reduce {self.reduce}",
                code="program-text",
                fix="Make programs with the generators and passes of ds_pipe.",
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}{'*' if self.reduce else ''}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form of an action, the inverse of `str`.

        Raises:
            PlanError: not the text form of an action ("program-text").
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text!r} is not an action",
                code="program-text",
                fix=f"Write stage, operation ({', '.join(op.value for op in ActionKind)}), microbatch, and * to reduce: 0B3*.",
            )
        return cls(ActionKind(match["op"]), int(match["stage"]), int(match["microbatch"]), bool(match["reduce"]))


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of every rank of one pipeline, in the order each rank runs them: `ranks[rank][time]`.

    `str(program)` prints one rank a line and `Program.parse` reads that back.
    """

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max((action.stage for actions in self.ranks for action in actions), default=-1)

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the step."""
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)

    def owners(self) -> dict[int, int]:
        """Return which rank computes each stage.

        Raises:
            PlanError: two ranks compute the same stage ("program-order").
        """
        owner: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.op.computes and owner.setdefault(action.stage, rank) != rank:
                    raise PlanError(
                        f"stage {action.stage} is computed by rank {owner[action.stage]} and by rank {rank} ({action})",
                        code="program-order",
                        fix="Give every stage to one rank.",
                    )
        return owner

    def backwards(self, rank: int) -> tuple[Action, ...]:
        """Return a rank's backwards that compute weight gradients, in order; they decide when to reduce gradients."""
        return tuple(action for action in self.ranks[rank] if action.op.differentiates)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse the text form of a program: one rank per line, actions separated by blanks."""
        return cls(tuple(tuple(Action.parse(word) for word in line.split()) for line in text.split("\n")))
