# The overloads of torch's stub are for callers; a subclass has one signature for all of them.
# mypy: disable-error-code="override,assignment"
"""What torch asks of every process group that is written in Python, beside its collectives."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

__all__ = ["PythonProcessGroup"]


class PythonProcessGroup(dist.ProcessGroup):
    """A process group of a backend of ours: its place, and the names that torch gives it.

    Args:
        rank, size: Of the group.
    Attributes:
        backend: The name under which the backend is registered.
    """

    backend: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._names = {"name": self.backend, "desc": self.backend}

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self.backend

    def name(self) -> str:
        return self.backend

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._names["name"]

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    @property
    def group_desc(self) -> str:
        return self._names["desc"]

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc
