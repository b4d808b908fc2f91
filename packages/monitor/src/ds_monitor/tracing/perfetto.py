"""A trace in Perfetto's own format: TrackEvents in protocol buffers, written here without a library, as it needs six messages.

A process a rank, a track a row, a slice a span; the spans of one collective are joined by a flow, gauges of memory are counters.
Reference: `protos/perfetto/trace/track_event` of Perfetto; field numbers are those of `perfetto_trace.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_monitor.tracing.matching import Collective
from ds_monitor.tracing.trace_reader import Rank, Span

__all__ = ["lanes", "write_perfetto"]

_BEGIN, _END, _COUNTER = 1, 2, 4
_SEQUENCE = 1
_INCREMENTAL_STATE_CLEARED = 1


def write_perfetto(
    ranks: Sequence[Rank],
    collectives: Sequence[Collective],
    path: str | Path,
    clocks: Mapping[int, float] | None = None,
) -> Path:
    """Write one file of all ranks. Times begin at the first span; `clocks` are taken away from each rank's times."""
    flows = {
        (rank, id(span)): number for number, one in enumerate(collectives, start=1) for rank, span in one.spans.items()
    }
    ahead = clocks or {}
    zero_s = min(span.began_s - ahead.get(rank.rank, 0.0) for rank in ranks for span in rank.spans)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for rank in ranks:
            for packet in _of_rank(rank, flows, zero_s + ahead.get(rank.rank, 0.0)):
                file.write(_field(1, packet))
    return path


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Assign spans to rows in which spans follow each other or nest; other overlaps go to a further row."""
    rows: list[tuple[list[Span], list[float]]] = []
    for span in sorted(spans, key=lambda s: (s.began_s, -s.seconds)):
        for row, open_ends in rows:
            while open_ends and open_ends[-1] <= span.began_s:
                open_ends.pop()
            if not open_ends or span.ended_s <= open_ends[-1]:
                row.append(span)
                open_ends.append(span.ended_s)
                break
        else:
            rows.append(([span], [span.ended_s]))
    return [row for row, _ in rows]


def _of_rank(rank: Rank, flows: Mapping[tuple[int, int], int], zero_s: float) -> Iterator[bytes]:
    process = (rank.rank + 1) << 32
    yield _packet(
        60,
        _number(1, process)
        + _text(2, f"rank {rank.rank}")
        + _field(3, _number(1, rank.rank + 1) + _text(6, f"rank {rank.rank}")),
    )
    track = process
    for name in sorted({span.row for span in rank.spans}):
        for index, row in enumerate(lanes([span for span in rank.spans if span.row == name])):
            track += 1
            title = name if index == 0 else f"{name} {index + 1}"
            yield _packet(60, _number(1, track) + _text(2, title or "spans") + _number(5, process))
            for at_s, _, kind, span in sorted(_edges(row), key=lambda edge: edge[:2]):
                event = _number(9, kind) + _number(11, track)
                if kind == _BEGIN:
                    event += _text(23, span.name) + _text(22, name or "span") + _notes(span.attrs)
                    if flow := flows.get((rank.rank, id(span))):
                        event += _key(47, 1) + struct.pack("<Q", flow)
                yield _packet(11, event, at_s - zero_s)
    for name in sorted({name for name, _, _ in rank.gauges if name.endswith("_bytes")}):
        track += 1
        yield _packet(60, _number(1, track) + _text(2, name) + _number(5, process) + _field(8, _text(6, "bytes")))
        for _, at_s, value in (gauge for gauge in rank.gauges if gauge[0] == name):
            event = _number(9, _COUNTER) + _number(11, track) + _key(44, 1) + struct.pack("<d", value)
            yield _packet(11, event, max(at_s - zero_s, 0.0))


def _edges(row: Sequence[Span]) -> Iterator[tuple[float, tuple[int, int], int, Span]]:
    """Yield begins and ends of spans with a sort key for equal times: ends first, inner before outer."""
    for index, span in enumerate(row):
        yield span.began_s, (1, index), _BEGIN, span
        yield span.ended_s, (0 if span.seconds > 0 else 2, -index), _END, span


def _notes(attrs: Mapping[str, Any]) -> bytes:
    out = b""
    for name, value in attrs.items():
        known = _number(4, value) if isinstance(value, int) and value >= 0 else _text(6, str(value))
        out += _field(4, _text(10, str(name)) + known)
    return out


def _packet(field: int, message: bytes, at_s: float | None = None) -> bytes:
    when = b"" if at_s is None else _number(8, max(0, round(at_s * 1e9)))
    flags = _number(13, _INCREMENTAL_STATE_CLEARED) if at_s is None else b""
    return when + _number(10, _SEQUENCE) + _field(field, message) + flags


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(int(value))


def _text(field: int, value: str) -> bytes:
    return _field(field, value.encode())


def _field(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
