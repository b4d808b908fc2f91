"""Waiting for another rank without a process group: as an operation of the recorder, for as long as the group is patient."""

from __future__ import annotations

import time
from collections.abc import Callable

from ds_comm.groups import Group, OpSequence
from ds_comm.watch.recorder import current
from ds_comm.work import failed
from ds_config.errors import CommError

__all__ = ["LIMIT_S", "SLICE_S", "own_order", "patient_s", "wait_until"]

LIMIT_S = 600.0  # where no watchdog runs; where one does, its deadline and the ranks' `extend_timeout` decide
SLICE_S = 0.5  # of a native wait, so that Python handles signals in between
_FOREVER_S = 1e9


def own_order(group: Group, name: str) -> OpSequence | None:
    """Create an operation sequence beside that of the group, for shared memory; None for a group of one rank.

    All ranks issue the same collective before the call: the mark of that collective distinguishes the new sequence from
    other sequences of the group.
    """
    order = group.order
    return None if order is None else OpSequence(f"{order.key}/{name}@{order.mark}", group.name, order.ranks, {})


def patient_s(limit_s: float) -> float:
    """Return the limit of a wait in seconds: unbounded where a watchdog ends waits, else `limit_s`."""
    return _FOREVER_S if current().watching() else limit_s


def wait_until(
    name: object, slot: int, come: Callable[[], bool], late: Callable[[], str], limit_s: float = LIMIT_S
) -> None:
    """Return when `come` says so. It sleeps between its polls, half a second at most.

    Args:
        name: The operation, as messages show it.
        slot: Its stamp. It is ended when this fails, and not otherwise: more may be to do.
        late: Who did not come, for the error after `limit_s`.
    Raises:
        CommError: a rank ended, came with something else, or did not come in time ("comm-timeout").
    """
    recorder = current()
    recorder.waiting(slot)
    deadline = time.monotonic() + patient_s(limit_s)
    try:
        while not come():
            if time.monotonic() > deadline:
                raise CommError(
                    f"{name}: {late()} did not come within {limit_s:.0f} s",
                    code="comm-timeout",
                    fix="See where it is; raise the timeout if it is only slow.",
                )
    except RuntimeError as error:
        recorder.ended(slot)
        raise failed(name, recorder.explain(slot), error) from None
