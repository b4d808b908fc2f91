"""One JSON object a line, for every record: the complete trace, easy to grep and to load."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ds_monitor.record import Measurement, RecordKind
from ds_monitor.sinks.sink import file_of_rank

__all__ = ["JsonlSink"]


class JsonlSink:
    """Append records to a file.

    A line has the keys kind, name, value, step, samples, time_s, attrs. Values that JSON has no number for are the
    strings "nan", "inf", "-inf"; attributes that JSON does not know are written as their `str`.

    Args:
        path: the file; its directory is made. An existing file is continued.
        kinds: which records to keep; all by default. Leave out `RecordKind.SPAN` where collectives are too many to store.
        rank: of this process where each rank has a sink; put before the ending of `path`.
    Cost: one system call per record.
    """

    outlives_process = True

    def __init__(
        self, path: str | Path, *, kinds: Collection[RecordKind | str] = tuple(RecordKind), rank: int | None = None
    ) -> None:
        self.path, self._kinds = file_of_rank(path, rank), frozenset(map(RecordKind, kinds))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a killed job keeps every line, and a forked child has no buffer to write a second time.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Measurement) -> None:
        """Append one line."""
        if record.kind not in self._kinds:
            return
        row: dict[str, Any] = {
            "kind": record.kind.value,
            "name": record.name,
            "value": record.value if math.isfinite(record.value) else str(record.value),
            "step": record.step,
            "samples": record.samples,
            "time_s": record.time_s,
            "attrs": dict(record.attrs),
        }
        try:
            line = json.dumps(row, default=str, separators=(",", ":"))
        except (ValueError, TypeError, RecursionError):  # attributes that hold themselves, or keys that are no strings
            line = json.dumps(
                {**row, "attrs": {str(k): str(v) for k, v in record.attrs.items()}}, separators=(",", ":")
            )
        self._file.write(line.encode() + b"\n")

    def end_step(self, step: int) -> None:
        """Do nothing: every line is written when its record arrives."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
