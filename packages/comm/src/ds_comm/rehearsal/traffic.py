"""What a rehearsed rank sent and what it waited for, as records and sums. Pure.

A collective is *exposed* where the rank had nothing to do but to wait for it: on a CPU the time in which the caller was blocked in
`wait`, on a device the time in which the stream that waits stood still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["LinkTransfer", "TransferSummary", "summarise"]


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """One operation.

    Attributes:
        op: `all_gather`, `send`, ...
        group: What its ranks share, as torch's description of the group says.
        unit: What was communicated, where the caller said so; may be empty.
        ranks: Of the group.
        nbytes: Of the whole message.
        start_s, end_s: When the links carried it, in seconds on the clock of `time.perf_counter`.
        exposed_s: How long the rank waited for it and did nothing else.
    """

    op: str
    group: str
    unit: str
    ranks: int
    nbytes: int
    start_s: float
    end_s: float
    exposed_s: float

    @property
    def cause(self) -> str:
        """What the rank waited for: the group, the operation, and what was communicated."""
        return f"{self.group} {self.op}" + (f" [{self.unit}]" if self.unit else "")


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """All operations of one cause: their number, bytes, the time on the links, and the time that was waited, in seconds."""

    cause: str
    count: int
    nbytes: int
    link_s: float
    exposed_s: float


def summarise(records: Iterable[LinkTransfer], by_unit: bool = False) -> list[TransferSummary]:
    """Sum records by group and operation (and unit, if `by_unit`), the longest waits first."""
    sums: dict[str, list[float]] = {}
    for record in records:
        cause = record.cause if by_unit else f"{record.group} {record.op}"
        total = sums.setdefault(cause, [0, 0, 0.0, 0.0])
        for at, value in enumerate((1, record.nbytes, record.end_s - record.start_s, record.exposed_s)):
            total[at] += value
    rows = [
        TransferSummary(cause, int(n), int(size), link, exposed) for cause, (n, size, link, exposed) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_s, -row.link_s, row.cause))
