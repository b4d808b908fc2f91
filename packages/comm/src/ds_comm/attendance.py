"""Who comes to a monitored barrier: each rank notes its arrival in the store of the process group, where the others read it.

Backends know little of that: gloo's rank 0 names one rank, by its number within the group; the other ranks name rank 0, and wait for
half an hour where it is rank 0 that does not come.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_comm._torch import store_of
from ds_comm.groups import Group

__all__ = ["absent_ranks", "record_arrival", "wait_for_arrivals"]

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.1


def record_arrival(group: Group) -> None:
    """Note in the store of the process group that this rank comes to its next operation. Cost: one message to the store.

    The note of a rank is overwritten by its next one, so that the store does not grow.
    """
    if group.link is not None and group.order is not None:
        _store(group.link).set(str(group.rank), str(group.order.mark + 1))


def absent_ranks(group: Group) -> list[int]:
    """Return the ranks of the world that did not come to the last operation of the process group; empty if the store is gone."""
    try:
        return _absent(group)
    except RuntimeError:  # rank 0 or the launcher served it
        return []


def wait_for_arrivals(group: Group, timeout: timedelta) -> None:
    """Wait until all ranks have come to the last operation of the process group, over the store alone.

    Raises:
        RuntimeError: some did not within `timeout`, or the store is gone.
    """
    end_s, pause_s = time.monotonic() + timeout.total_seconds(), _FIRST_POLL_S
    while _absent(group):
        if time.monotonic() > end_s:
            raise RuntimeError(f"ranks did not come within {timeout.total_seconds():g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)


def _absent(group: Group) -> list[int]:
    if group.link is None or group.order is None:
        return []
    store, keys = _store(group.link), [str(place) for place in range(group.size)]
    if store.has_extended_api() and store.check(keys):
        marks = [int(value) for value in store.multi_get(keys)]  # one message, however many ranks
    else:
        marks = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
    return [rank for rank, mark in zip(group.ranks, marks, strict=True) if mark < group.order.mark]


def _store(pg: dist.ProcessGroup) -> Any:  # torch's stubs lack multi_get
    return dist.PrefixStore("ds_comm/attendance", store_of(pg))
