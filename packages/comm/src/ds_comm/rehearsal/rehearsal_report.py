"""From what a rehearsal saw to a table, a trace, and the least step that its bytes allow. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_comm.rehearsal.step_marks import PhaseTimes
from ds_comm.rehearsal.traffic import LinkTransfer, TransferSummary, summarise
from ds_config.sizes import bytes_text

__all__ = ["RehearsalResult", "result_from", "table", "trace_events"]

_ROWS = 8
_LEAST_SHARE = 0.002  # of the step; shorter waits are summed up


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """What one rank of one world took.

    Attributes:
        label: What was varied; empty: nothing.
        step_s: Median of the measured steps.
        exposed_s: Of a step, the time in which the rank waited for links and did nothing else.
        link_s: Of a step, the time in which the links were busy for this rank.
        least_s: The sum over forward, backward and update of the longer of computing and links: what the bytes allow.
        wire_bytes: Of a step, the bytes of the messages.
        exposed: By group and operation, a step's share.
        memory: Peaks in bytes.
    """

    label: str
    fabric: str
    world_size: int
    rank: int
    device: str
    steps: int
    step_s: float
    exposed_s: float
    link_s: float
    least_s: float
    wire_bytes: int
    exposed: tuple[TransferSummary, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """The step without the time that was waited for links."""
        return self.step_s - self.exposed_s

    @property
    def exposed_share(self) -> float:
        """Which part of the step was waited for links."""
        return self.exposed_s / self.step_s if self.step_s else 0.0


def result_from(outcome: Mapping[str, Any]) -> RehearsalResult | None:
    """Build the result from what a rehearsed script wrote; None if it made no step after those that warm up."""
    order = outcome["order"]
    steps = [PhaseTimes(**step) for step in outcome["steps"]][order["warm_up"] :]
    if not steps:
        return None
    traffic = [LinkTransfer(**record) for record in outcome["traffic"]]
    began_s, ended_s = steps[0].update_s, steps[-1].end_s
    inside = [record for record in traffic if began_s <= record.end_s < ended_s]
    count = len(steps)
    exposed = tuple(
        TransferSummary(
            row.cause, round(row.count / count), row.nbytes // count, row.link_s / count, row.exposed_s / count
        )
        for row in summarise(inside)
    )
    return RehearsalResult(
        order.get("label", ""),
        order["fabric"]["name"],
        order["world_size"],
        order["rank"],
        outcome["device"],
        count,
        statistics.median(step.end_s - step.update_s for step in steps),
        sum(row.exposed_s for row in exposed),
        sum(row.link_s for row in exposed),
        statistics.median(_least_s(step, traffic) for step in steps),
        sum(row.nbytes for row in exposed),
        exposed,
        outcome["memory"],
    )


def _least_s(step: PhaseTimes, traffic: Sequence[LinkTransfer]) -> float:
    """Return the sum over the phases of a step of the longer of its computing and its links."""
    edges = (step.update_s, step.forward_s, step.backward_s, step.end_s)
    least = 0.0
    for began, ended in itertools.pairwise(edges):
        link = sum(max(0.0, min(r.end_s, ended) - max(r.start_s, began)) for r in traffic)
        waited = sum(r.exposed_s for r in traffic if began <= r.end_s < ended)
        least += max(ended - began - waited, link)
    return least


def table(results: Iterable[RehearsalResult]) -> str:
    """Return a row for each result, and below what the last one waited for."""
    rows = list(results)
    head = ["", "world", "rank", "step ms", "compute", "exposed", "", "least", "sent", "peak memory"]
    lines = [head]
    for row in rows:
        peak = row.memory.get("device_peak", row.memory.get("host_peak", 0))
        lines.append(
            [
                row.label,
                str(row.world_size),
                str(row.rank),
                _ms(row.step_s),
                _ms(row.compute_s),
                _ms(row.exposed_s),
                f"{row.exposed_share:.0%}",
                _ms(row.least_s),
                bytes_text(row.wire_bytes),
                bytes_text(peak),
            ]
        )
    text = _aligned(lines)
    if rows and rows[-1].exposed:
        text += f"\n\nwhat a step of the last row waits for, on {rows[-1].fabric}:\n" + _causes(rows[-1])
    return text


def _causes(result: RehearsalResult) -> str:
    shown = [row for row in result.exposed if row.exposed_s >= _LEAST_SHARE * result.step_s][:_ROWS]
    lines = [["", "calls", "bytes", "links ms", "exposed ms"]]
    lines += [[r.cause, str(r.count), bytes_text(r.nbytes), _ms(r.link_s), _ms(r.exposed_s)] for r in shown]
    rest = result.exposed_s - sum(row.exposed_s for row in shown)
    if len(shown) < len(result.exposed):
        lines.append([f"{len(result.exposed) - len(shown)} more", "", "", "", _ms(rest)])
    return _aligned(lines)


def trace_events(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace in Chrome's format (Perfetto reads it): steps with their phases, and what the links carried."""
    steps = [PhaseTimes(**step) for step in outcome["steps"]]
    records = [LinkTransfer(**record) for record in outcome["traffic"]]
    origin = min([step.update_s for step in steps] + [record.start_s for record in records], default=0.0)

    def event(name: str, row: str, began: float, ended: float, **details: Any) -> dict[str, Any]:
        place = {"pid": f"rank {outcome['order']['rank']}", "tid": row, "ts": (began - origin) * 1e6}
        return {"name": name, "ph": "X", "dur": (ended - began) * 1e6, **place, "args": details}

    events = []
    for number, step in enumerate(steps):
        events.append(event(f"step {number}", "steps", step.update_s, step.end_s))
        edges = (step.update_s, step.forward_s, step.backward_s, step.end_s)
        for name, (began, ended) in zip(("update", "forward", "backward"), itertools.pairwise(edges), strict=True):
            events.append(event(name, "phases", began, ended))
    for r in records:
        details = {"bytes": r.nbytes, "ranks": r.ranks, "exposed_ms": r.exposed_s * 1e3}
        events.append(event(r.cause, "links", r.start_s, r.end_s, **details))
    return {"traceEvents": events, "rehearsal": True}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
