"""What sinks share: one value per name and step, on the axis of steps or of samples; a place of its own for each rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from ds_config.errors import ConfigError, UnsupportedError
from ds_monitor.record import Measurement, RecordKind

__all__ = ["Axis", "ScalarSink", "file_of_rank", "folder_of_rank", "position", "require"]

Axis = Literal["step", "samples"]


def position(record: Measurement, axis: Axis) -> int:
    """Return the record's position on `axis`; a record without a sample count is placed by its step."""
    return record.samples if axis == "samples" and record.samples is not None else record.step


class ScalarSink:
    """Collects gauges (the last of a step) and counters (running totals), and hands them on once a step.

    A subclass gives `put(name, value, x, time_s)`, called at most once per name and step, with x never repeated for a
    name unless the job itself returns to an earlier step.
    """

    outlives_process = True  # what is put is kept as results of a job; a rehearsal has none

    def __init__(self, axis: Axis = "step") -> None:
        if axis not in get_args(Axis):
            raise ConfigError(
                f"the axis of {type(self).__name__} is {axis!r}",
                code="monitor-sink-options",
                fix=f"Use one of {', '.join(get_args(Axis))}.",
            )
        self.axis: Axis = axis
        self._totals: dict[str, float] = {}
        self._pending: dict[str, tuple[float, int, float]] = {}

    def write(self, record: Measurement) -> None:
        """Collect a gauge or a counter; spans and events are not single numbers of a step and are left out."""
        if record.kind is RecordKind.COUNTER:
            value = self._totals.get(record.name, 0.0) + record.value
            self._totals[record.name] = value
        elif record.kind is RecordKind.GAUGE:
            value = record.value
        else:
            return
        self._pending[record.name] = (value, position(record, self.axis), record.time_s)

    def end_step(self, step: int) -> None:
        """Write the values that the step collected."""
        pending, self._pending = self._pending, {}
        for name, (value, x, time_s) in pending.items():
            self.put(name, value, x, time_s)

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Store one value of one name."""
        raise TypeError(f"{type(self).__name__} must define put(name, value, x, time_s)")

    def close(self) -> None:
        """Do nothing: this base class owns no resources."""


def file_of_rank(path: str | Path, rank: int | None) -> Path:
    """Return the path of a rank's file: `trace.jsonl` -> `trace.rank3.jsonl`.

    `path` is unchanged when `rank` is None, for the only rank that writes.
    """
    path = Path(path)
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def folder_of_rank(path: str | Path, rank: int | None) -> Path:
    """Return the path of a rank's folder: `logs` -> `logs/rank3`.

    `path` is unchanged when `rank` is None, for the only rank that writes.
    """
    return Path(path) if rank is None else Path(path) / f"rank{rank}"


def require(module: str, extra: str, package: str = "") -> ModuleType:
    """Import an optional dependency, or say which extra brings it. `package` is what has the module, where that is called otherwise.

    Raises:
        UnsupportedError: not installed ("monitor-extra").
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"the sink asked for needs the package `{package or module.split('.')[0]}`, which is not installed ({error})",
            code="monitor-extra",
            fix=f"Install it with: pip install 'ds-monitor[{extra}]'",
        ) from error
