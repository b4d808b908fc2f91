"""What a package tells of the machine it is on, as data: its part of `ds report`.

Words: a *check* is one fact with its verdict. *Broken* is what was meant to work and does not; only that makes `ds report` fail.

A package adds its part by an entry point of the group `ds.reports`: a function that takes `quick` and returns a `PackageReport`. With `quick`
it answers in a moment: it imports no torch and starts no process; what it cannot say so it leaves out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["GROUP", "Check", "PackageReport", "ReportLevel", "TextTable"]

GROUP = "ds.reports"


class ReportLevel(enum.Enum):
    """fine: as good as it gets. info: says what is there. slower: works, something better is possible. broken: fails."""

    FINE = "fine"
    INFO = "info"
    SLOWER = "slower"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One fact with its verdict. fix: the command or sentence that changes it, empty where nothing is to be done."""

    section: str
    name: str
    verdict: ReportLevel
    result: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of texts below their heads; `note` says in one line what they are."""

    title: str
    note: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class PackageReport:
    """One package's part.

    Attributes:
        checks: In the order they are shown; those of a section follow each other.
        tables: Shown below all checks.
        data: What JSON has beside the checks, by name: plain values.
    """

    checks: tuple[Check, ...] = ()
    tables: tuple[TextTable, ...] = ()
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
