"""What the files of a run tell of each rank: its spans and gauges.

Two kinds of files are read, one a rank: those of `JsonlSink` (`trace.rank3.jsonl`), and traces of torch's profiler
(`export_chrome_trace`; the rank is in `distributedInfo`, or in the name, as `rank3`).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_config.errors import ConfigError

__all__ = ["Rank", "Span", "read_ranks"]

_RANK = re.compile(r"rank[-_]?(\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one rank.

    Attributes:
        began_s: Seconds since the epoch, by that host's clock.
        group: Which ranks a collective is of; empty for what is none.
        place: Of the collective in the order of its group.
        row: What shows it: spans of one row follow each other or lie within each other.
    """

    name: str
    began_s: float
    seconds: float
    group: str = ""
    place: int = 0
    row: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended_s(self) -> float:
        """When it was over."""
        return self.began_s + self.seconds


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank told. `gauges` are (name, seconds since the epoch, value), in order of time."""

    rank: int
    spans: tuple[Span, ...]
    gauges: tuple[tuple[str, float, float], ...] = ()


def read_ranks(folder: str | Path) -> tuple[Rank, ...]:
    """Read every file of a run; ranks in order.

    Raises:
        ConfigError: no such folder, no file of a rank in it, or two of one rank ("monitor-trace").
    """
    folder = Path(folder)
    files = (
        sorted(f for f in folder.rglob("*") if f.name.endswith((".jsonl", ".json", ".json.gz")))
        if folder.is_dir()
        else []
    )
    by_rank: dict[int, tuple[Path, Rank]] = {}
    for file in files:
        rank = _jsonl(file) if file.suffix == ".jsonl" else _profile(file)
        if rank is None:
            continue
        if rank.rank in by_rank:
            raise ConfigError(
                f"{by_rank[rank.rank][0]} and {file} both are of rank {rank.rank}",
                code="monitor-trace",
                fix="Give a folder with the files of one run.",
            )
        by_rank[rank.rank] = (file, rank)
    if not by_rank:
        raise ConfigError(
            f"{folder} has no file with spans of a rank",
            code="monitor-trace",
            fix='Have each rank write one: "monitor": {"sinks": [{"sink": "jsonl", "ranks": "all", "options": {"path": "DIR/trace.jsonl"}}]}.',
        )
    return tuple(rank for _, (_, rank) in sorted(by_rank.items()))


def _of_name(file: Path) -> int:
    numbers = _RANK.findall(f"{file.parent.name}/{file.name}")
    return int(numbers[-1]) if numbers else 0


def _jsonl(file: Path) -> Rank | None:
    spans, gauges = [], []
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            if not isinstance(row, dict) or not {"kind", "name", "value", "time_s"} <= row.keys():
                return None  # some other file
            if row["kind"] == "span":
                attrs = row.get("attrs") or {}
                group, place = str(attrs.get("key", "")), int(attrs.get("place", 0))
                kind = row["name"].split("/")[0]
                spans.append(
                    Span(row["name"], row["time_s"], float(row["value"]), group if place else "", place, kind, attrs)
                )
            elif row["kind"] == "gauge":
                gauges.append((row["name"], row["time_s"], float(row["value"])))
    if not spans:
        return None
    return Rank(_of_name(file), tuple(sorted(spans, key=lambda s: s.began_s)), tuple(gauges))


def _profile(file: Path) -> Rank | None:
    opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8")  # noqa: SIM115
    with opened as text:
        try:
            trace = json.load(text)
        except ValueError:
            return None
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        return None
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    spans = sorted(_events(trace["traceEvents"], base_us), key=lambda s: s.began_s)
    rank = trace.get("distributedInfo", {}).get("rank", _of_name(file))
    return Rank(int(rank), tuple(_placed(spans))) if spans else None


def _events(events: list[dict[str, Any]], base_us: float) -> Iterator[Span]:
    for event in events:
        if event.get("ph") == "X" and "dur" in event and "ts" in event:
            attrs = event.get("args") or {}
            group = str(attrs.get("Process Group Name", "")) if event["name"] == "record_param_comms" else ""
            name = f"comm/{attrs['Collective name']}" if group and attrs.get("Collective name") else str(event["name"])
            row = f"{event.get('cat', '')} {event.get('tid', '')}"
            yield Span(name, (float(event["ts"]) + base_us) / 1e6, float(event["dur"]) / 1e6, group, 0, row, attrs)


def _placed(spans: list[Span]) -> Iterator[Span]:
    """Number the collectives of each group by the order of their start, as torch's profiler has no numbers."""
    counts: dict[str, int] = {}
    for span in spans:
        if not span.group:
            yield span
            continue
        counts[span.group] = place = counts.get(span.group, 0) + 1
        yield Span(span.name, span.began_s, span.seconds, span.group, place, span.row, span.attrs)
