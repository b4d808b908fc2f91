"""Words that ranks leave for each other, outside of every collective: for calls of which nobody knows whether all ranks make them.

A word stays until the job ends. Nothing is sent but the word, and no rank waits for one that leaves its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

import torch.distributed as dist

from ds_comm._torch import second_connection
from ds_comm.groups import world_group

__all__ = ["collect_notices", "post_notice"]


def post_notice(topic: str, word: str) -> None:
    """Leave a word of this rank, where process groups are; the last one counts. Returns at once."""
    _notes().set(f"{topic}/{dist.get_rank()}", word)


def collect_notices(topic: str, wait_s: float, enough: Callable[[Mapping[int, str]], bool]) -> dict[int, str]:
    """Collect the notices of the world's ranks under `topic` until `enough`, all ranks posted, or `wait_s` passed.

    Returns the notices posted so far, by rank.
    """
    notes, end, messages = _notes(), time.monotonic() + wait_s, dict[int, str]()
    while True:
        for rank in sorted(set(range(dist.get_world_size())) - set(messages)):
            if notes.check([f"{topic}/{rank}"]):
                messages[rank] = notes.get(f"{topic}/{rank}").decode()
        if enough(messages) or len(messages) == dist.get_world_size() or time.monotonic() > end:
            return messages
        time.sleep(0.02)


def _notes() -> dist.PrefixStore:
    world = cast(dist.ProcessGroup, world_group().pg)  # one rank alone has nobody to leave words for
    return dist.PrefixStore("ds_comm/notes", second_connection(world))
