"""The comms logger: counts, sizes, latencies and bandwidths of every collective, and who makes the others wait.

A sink of ds-monitor. It reads the spans that collectives report (`comm/<op>`, from the call to the end of the wait), so an
asynchronous operation counts the time in which it overlapped with computation, too.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_comm.bandwidth import bandwidth, message_bytes
from ds_comm.config import CommsLoggerConfig
from ds_comm.groups import GroupLike, as_group
from ds_comm.object_collectives import all_gather_object
from ds_comm.work import time_device_operations
from ds_config.sizes import bytes_text
from ds_monitor import Measurement, RecordKind, log_requested
from ds_monitor.stats import trimmed_mean

__all__ = ["CommsLogger", "SummaryRow"]

_log = logging.getLogger(__name__)
_PREFIX = "comm/"
_TRIMMED = 0.1  # of the latencies at either end
_Key = tuple[str, int, int]  # operation, bytes of the whole message, ranks


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One operation at one message size in groups of one size. Averages are 10 % trimmed means.

    Attributes:
        comm_ms: Latency of the fastest rank, operation by operation: what communication itself took.
        straggler_ms: What this rank waited beyond that, for ranks that came late. None without straggler analysis.
    """

    op: str
    message_bytes: int
    ranks: int
    count: int
    total_ms: float
    average_ms: float
    algorithm_gbps: float
    bus_gbps: float
    comm_ms: float | None = None
    straggler_ms: float | None = None


class CommsLogger:
    """Collects from the moment it is given to `ds_monitor.configure`."""

    def __init__(self, config: CommsLoggerConfig | None = None) -> None:
        self.config = config if config is not None else CommsLoggerConfig(enabled=True)
        self._latencies_s: dict[_Key, array[float]] = {}
        time_device_operations(True)

    def write(self, record: Measurement) -> None:
        """Count a collective; other records do not concern it."""
        if record.kind is not RecordKind.SPAN or not record.name.startswith(_PREFIX) or "ranks" not in record.attrs:
            return
        op, unit = record.name.removeprefix(_PREFIX), record.attrs["unit"]
        if not self.config.prof_all and not {op, unit} & set(self.config.prof_ops):
            return
        ranks = record.attrs["ranks"]
        size = message_bytes(op, record.attrs["nbytes"], ranks)
        name = f"{op}[{unit}]" if self.config.debug and unit else op
        self._latencies_s.setdefault((name, size, ranks), array("d")).append(record.value)
        if self.config.verbose:
            speed = bandwidth(op, record.attrs["nbytes"], ranks, record.value)
            text = f"{op}[{unit}] {size} bytes, {ranks} ranks: {record.value * 1e3:.3f} ms"
            log_requested(_log, f"{text}, {speed.algorithm_gbps:.2f} Gbps, bus {speed.bus_gbps:.2f} Gbps")

    def end_step(self, step: int) -> None:
        """Do nothing: totals accumulate over all steps."""

    def close(self) -> None:
        """Stop waiting for the device; what was collected stays."""
        time_device_operations(False)

    def reset(self) -> None:
        """Forget what was collected."""
        self._latencies_s.clear()

    def has_data(self) -> bool:
        """Whether anything was collected."""
        return bool(self._latencies_s)

    def summary(self, fastest_s: Mapping[_Key, Sequence[float]] | None = None) -> list[SummaryRow]:
        """Build a row per operation and message size, sorted by both.

        `fastest_s`: of each operation, the latency of its fastest rank.
        """
        return [
            _row(key, latencies, None if fastest_s is None else fastest_s.get(key, ()))
            for key, latencies in sorted(self._latencies_s.items())
        ]

    def log_summary(self, show_straggler: bool = False, group: GroupLike = None) -> str:
        """Log the table and return it. With `show_straggler` all ranks of `group` call it together."""
        text = table(self.summary(self._fastest(group) if show_straggler else None))
        log_requested(_log, f"communication so far\n{text}")
        return text

    def as_dict(self, show_straggler: bool = False, group: GroupLike = None) -> dict[str, Any]:
        """Return the summary as plain data, with stragglers if `show_straggler` (collective over `group`)."""
        rows = self.summary(self._fastest(group) if show_straggler else None)
        return {
            "summary": [asdict(row) for row in rows],
            "metadata": {"trimmed": _TRIMMED, "ranks": as_group(group).size},
        }

    def _fastest(self, group: GroupLike) -> dict[_Key, list[float]]:
        """Return the fastest rank's latency of every operation that all ranks of the group logged. Collective."""
        group = as_group(group)
        every: list[dict[_Key, list[float]]] = [{} for _ in range(group.size)]
        all_gather_object(
            every, {key: list(latencies) for key, latencies in self._latencies_s.items()}, group, unit="comms logger"
        )
        common = set.intersection(*(set(one) for one in every))
        return {key: [min(times) for times in zip(*(one[key] for one in every), strict=False)] for key in common}


def table(rows: Iterable[SummaryRow]) -> str:
    """Format the summary as text, one line per operation and size."""
    rows = list(rows)
    head = ["Comm. Op", "Message Size", "Ranks", "Count", "Total Latency(ms)", "Avg Latency(ms)"]
    head += ["tput_avg (Gbps)", "busbw_avg (Gbps)"]
    straggler = any(row.straggler_ms is not None for row in rows)
    if straggler:
        head += ["Comm lat(ms)", "Straggler(ms)"]
    lines = [head]
    for row in rows:
        cells = [row.op, bytes_text(row.message_bytes), str(row.ranks), str(row.count), f"{row.total_ms:.2f}"]
        cells += [f"{row.average_ms:.3f}", f"{row.algorithm_gbps:.2f}", f"{row.bus_gbps:.2f}"]
        if straggler:
            cells += ["" if value is None else f"{value:.2f}" for value in (row.comm_ms, row.straggler_ms)]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _row(key: _Key, latencies_s: Sequence[float], fastest_s: Sequence[float] | None) -> SummaryRow:
    name, size, ranks = key
    op = name.partition("[")[0]
    average_s = trimmed_mean(latencies_s, _TRIMMED)
    speed = bandwidth(op, size // message_bytes(op, 1, ranks), ranks, average_s)
    comm_ms = straggler_ms = None
    if fastest_s is not None:
        comm_ms = sum(fastest_s) * 1e3
        straggler_ms = sum(latencies_s[: len(fastest_s)]) * 1e3 - comm_ms
    total_ms = sum(latencies_s) * 1e3
    return SummaryRow(
        name,
        size,
        ranks,
        len(latencies_s),
        total_ms,
        average_s * 1e3,
        speed.algorithm_gbps,
        speed.bus_gbps,
        comm_ms,
        straggler_ms,
    )
