"""Ranks do something all together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ds_ckpt.agree import Ranks
from ds_comm import Group
from ds_config.errors import CommError, PlanError

__all__ = ["together"]

_T = TypeVar("_T")


def together(group: Group, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank of `group`; return its result when it went well on all of them. Collective.

    Raises:
        PlanError: it went well here and not on another rank ("engine-other-rank"), whose own error is raised there.
    Cost: two all-gathers of a few bytes.
    """
    mine: Exception | None = None
    try:
        result = action()
    except CommError:  # the ranks no longer meet
        raise
    except Exception as error:
        mine = error
    if group.size > 1:
        said = "" if mine is None else f"{type(mine).__name__}: {getattr(mine, 'message', mine)}"
        answers: list[str] = Ranks(group).exchange(said)
    else:
        answers = []
    if mine is not None:
        raise mine
    for rank, answer in enumerate(answers):
        if answer:
            raise PlanError(
                f"rank {rank} failed: {answer}",
                code="engine-other-rank",
                fix="Mend what that rank says; its own error has the traceback.",
            )
    return result
