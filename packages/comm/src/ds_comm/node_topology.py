"""Which ranks of a group can see each other's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import ds_ops._native as _native
from ds_comm.groups import Group
from ds_comm.metadata import all_gather_json
from ds_comm.rehearsal.staging import is_rehearsal
from ds_ops.shm_collectives import pid_namespace_id

__all__ = ["Neighbour", "neighbours"]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank as the others of its host see it.

    Attributes:
        place: Its host and PID namespace; empty where it cannot share memory.
        pid: Its process id there.
    """

    place: str
    pid: int

    def shares(self, other: Neighbour) -> bool:
        """Whether both can map one memory."""
        return bool(self.place) and self.place == other.place


def neighbours(group: Group, *, unit: str = "neighbours") -> list[Neighbour]:
    """Gather the host and process of each rank of `group`. Collective over the group."""
    if is_rehearsal():  # their memory is not there
        return [Neighbour("", rank) for rank in group.ranks]
    able = _native.load("_cpu").module is not None and hasattr(os, "memfd_create")
    return [
        Neighbour(*fields)
        for fields in all_gather_json([pid_namespace_id() if able else "", os.getpid()], group, unit=unit)
    ]
