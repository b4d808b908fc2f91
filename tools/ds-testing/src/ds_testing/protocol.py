"""What the pool and its workers say to each other. Plain data; importing this file imports nothing else of ours.

One test on one rank: `Job` -> (body runs) -> `Report`, then, when every rank has reported, `Finish` -> `Finished`.
The second exchange is why no rank takes its process group down while another still reads from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Finish", "Finished", "Job", "Outcome", "Ready", "Report", "Source"]


class Outcome(Enum):
    """How a body ended on one rank."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


@dataclass(frozen=True, slots=True)
class Source:
    """A module that pytest imported by path: the test's file, or a conftest.py above it."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Torch is imported; `store_port` is where this worker would serve the store of a world."""

    store_port: int


@dataclass(frozen=True, slots=True)
class Job:
    """One world test on one rank.

    Attributes:
        key: Unique in the pool's life; names the test's keys in the store.
        qualname: The function inside the module (`test_a`, `TestB.test_c`).
        sources: The test's file first, then the conftest.py files that arguments may refer to.
        arguments: A pickled dict of keyword arguments.
        store_port: The store of rank 0's worker, on the loopback interface.
        master_port: A free port for a body that makes its own process group.
        variables: More of the environment, for ranks on cards; their card is LOCAL_RANK.
    """

    key: str
    qualname: str
    sources: tuple[Source, ...]
    arguments: bytes
    rank: int
    size: int
    backend: str | None
    timeout: float
    store_port: int
    master_port: int
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """How the body ended.

    Attributes:
        text: The traceback of a failure, the reason of a skip.
        when: `time.monotonic()`, which is one clock for all processes of a machine: it orders failures.
    """

    outcome: Outcome
    text: str
    when: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Every rank has reported: take the process group down."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the test left behind, one line each, and whether the worker could undo all of it."""

    leaks: tuple[str, ...]
    restored: bool
