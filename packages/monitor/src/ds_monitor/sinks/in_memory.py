"""Keeps records in a list: for tests, and for code that looks at its own numbers."""

from __future__ import annotations

from ds_monitor.record import Measurement, RecordKind

__all__ = ["MemorySink"]


class MemorySink:
    """Every record in order, in `records`; the completed steps in `steps`."""

    def __init__(self) -> None:
        self.records: list[Measurement] = []
        self.steps: list[int] = []
        self.closed = False

    def write(self, record: Measurement) -> None:
        """Keep it."""
        self.records.append(record)

    def end_step(self, step: int) -> None:
        """Note the step."""
        self.steps.append(step)

    def close(self) -> None:
        """Note it; the records stay."""
        self.closed = True

    def named(self, name: str) -> list[Measurement]:
        """Return the records of one name, oldest first."""
        return [record for record in self.records if record.name == name]

    def total(self, name: str) -> float:
        """Sum of a counter."""
        return sum(record.value for record in self.records if record.kind is RecordKind.COUNTER and record.name == name)
