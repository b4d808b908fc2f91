"""Ranks do something all together or not at all."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from ds_ckpt.coordinator import Coordinator
from ds_comm import Group, Mesh
from ds_config.errors import CommError, PlanError

__all__ = ["all_or_nothing", "anywhere"]

_T = TypeVar("_T")


def all_or_nothing(group: Group, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank of `group`; return its result when it went well on all of them. Collective.

    Raises:
        PlanError: it went well here and not on another rank ("engine-other-rank"), whose own error is raised there.
    Cost: a small message for each doubling of the group.
    """
    failure: Exception | None = None
    try:
        result = action()
    except CommError:  # the ranks no longer call the same collectives
        raise
    except Exception as error:
        failure = error
    report = (
        None if failure is None else [group.rank, f"{type(failure).__name__}: {getattr(failure, 'message', failure)}"]
    )
    first = Coordinator(group).spread(report, _first)
    if failure is not None:
        raise failure
    if first is not None:
        raise PlanError(
            f"rank {first[0]} failed: {first[1]}",
            code="engine-other-rank",
            fix="Mend what that rank says; its own error has the traceback.",
        )
    return result


def anywhere(mesh: Mesh) -> Callable[[bool], bool]:
    """Return what tells whether something is so on some rank: collective over stages of a pipeline, whose parameters differ.

    Elsewhere all ranks have the same parameters, and each knows.
    """
    return bool if mesh["pipe"].size == 1 else lambda here: Coordinator(mesh["world"]).spread(here, operator.or_)


def _first(one: list[Any] | None, other: list[Any] | None) -> list[Any] | None:
    """Return the error of the lower rank; None if neither failed."""
    return min((error for error in (one, other) if error is not None), default=None)
