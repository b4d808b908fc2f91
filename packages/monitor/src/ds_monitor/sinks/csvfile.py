"""One CSV file per name, as dashboards of DeepSpeed jobs expect: `<dir>/Train_Samples_lr.csv` with header `step,lr`."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import IO, Any

from ds_monitor.sinks.sink import Axis, ScalarSink, folder_of_rank

__all__ = ["CsvSink"]


class CsvSink(ScalarSink):
    """Append `x,value` rows, one file per name; a file that exists is continued, never given a second header.

    Args:
        directory: made when the first value comes.
        axis: what the first column holds. The column is called `step` for both, as dashboards expect.
        rank: of this process where each rank has a sink: its files are in `<directory>/rank<rank>`.
    Cost: one write and one flush per name and step.
    """

    def __init__(self, directory: str | Path, *, axis: Axis = "step", rank: int | None = None) -> None:
        super().__init__(axis)
        self.directory = folder_of_rank(directory, rank)
        self._files: dict[str, IO[str]] = {}
        self._writers: dict[str, Any] = {}

    def put(self, name: str, value: float, x: int, time_s: float) -> None:
        """Append one row to the file of `name`."""
        if name not in self._writers:
            self._open(name)
        self._writers[name].writerow([x, value])
        self._files[name].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._writers.clear()

    def _open(self, name: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _file_name(name)
        file = open(path, "a", newline="", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._files[name], self._writers[name] = file, csv.writer(file)
        if file.tell() == 0:
            self._writers[name].writerow(["step", name.rsplit("/", 1)[-1]])


def _file_name(name: str) -> str:
    """Return `name` as dashboards expect it; one that no file can have is cut, with its hash so that two stay apart."""
    plain = name.replace("/", "_").replace("\0", "_").encode("utf-8", "replace")
    if len(plain) > 250:
        plain = plain[:200] + hashlib.blake2b(plain, digest_size=8).hexdigest().encode()
    return plain.decode("utf-8", "ignore") + ".csv"
