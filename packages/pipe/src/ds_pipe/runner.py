"""The interpreter: run a rank's actions by calling one handler an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ds_config.errors import PlanError
from ds_pipe.actions import Action, ActionKind

__all__ = ["Handler", "run"]

Handler = Callable[[Action], None]


def run(actions: Iterable[Action], handlers: Mapping[ActionKind, Handler]) -> None:
    """Call `handlers[action.op](action)` for every action, in order.

    Handlers keep their own state (activations, losses); an error of a handler ends the run and is passed on.

    Raises:
        PlanError: an operation has no handler ("program-handler"); raised before anything runs.
    """
    actions = tuple(actions)
    missing = sorted({action.op.name for action in actions if action.op not in handlers})
    if missing:
        raise PlanError(
            f"the program needs {', '.join(missing)}, handlers exist for {', '.join(sorted(op.name for op in handlers))}",
            code="program-handler",
            fix="Pass a handler for every operation of the program.",
        )
    for action in actions:
        handlers[action.op](action)
