"""Traces of ranks become one: collectives are matched by group and place, clocks are compared, and the late rank is named."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_monitor import JsonlSink, Measurement, RecordKind, cli, metric_names
from ds_monitor.tracing import Rank, Span, lateness, match, offsets, read_ranks, straggler, write_perfetto
from ds_monitor.tracing.perfetto import lanes

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

CLOCK_S = 1_000_000.0


def rank_of(number: int, ranks: int = 4, late: int = 2, ahead_s: float = 0.0) -> Rank:
    """Ten all-reduces of 1 ms after 9 ms of work; `late` works 5 ms longer. Of another group, one that this rank names alone."""
    spans = []
    for place in range(1, 11):
        began = CLOCK_S + ahead_s + place * 0.02
        mine = began + (0.014 if number == late else 0.009 + number * 1e-4)
        spans.append(Span("engine/forward", began, mine - began, row="engine"))
        spans.append(Span("comm/all_reduce", mine, began + 0.015 - mine, "world", place, "comm", {"nbytes": 4}))
        spans.append(Span("engine/step", began + 0.015, 0.003, row="engine"))
    return Rank(number, tuple(spans), (("Train/memory/allocated_bytes", CLOCK_S + 0.02, 100.0),))


def test_collectives_are_matched_and_the_late_rank_is_named() -> None:
    ranks = [rank_of(n) for n in range(4)]
    calls = match(ranks)
    assert [(c.name, c.place, sorted(c.spans)) for c in calls] == [
        ("comm/all_reduce", p, [0, 1, 2, 3]) for p in range(1, 11)
    ]
    late = lateness(calls)
    assert (late[0].rank, late[0].times_last) == (2, 10)
    assert late[0].seconds == pytest.approx(10 * (0.014 - 0.0093), abs=1e-6)
    worst = straggler(late, 0.2)
    assert worst is not None
    assert worst.rank == 2
    assert straggler(late, 100.0) is None  # it is not worth a word
    assert straggler(lateness(match([rank_of(n, late=9) for n in range(4)])), 1.0) is None


def test_what_ranks_call_differently_is_no_match() -> None:
    other = Rank(1, (Span("comm/broadcast", CLOCK_S, 1.0, "world", 1),))
    assert [c.place for c in match([rank_of(0), other])] == []


def test_a_clock_that_is_ahead_is_seen_and_is_no_lateness() -> None:
    ranks = [rank_of(n, ahead_s=0.5 if n == 3 else 0.0) for n in range(4)]
    calls = match(ranks)
    clocks = offsets(calls)
    assert clocks == {3: pytest.approx(0.5, abs=1e-6)}
    assert lateness(calls, clocks)[0].rank == 2


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=25)


@given(spans)
def test_within_a_row_spans_follow_or_nest(times: list[tuple[int, int]]) -> None:
    given_spans = [Span(str(i), float(began), float(took)) for i, (began, took) in enumerate(times)]
    rows = lanes(given_spans)
    assert sorted(s.name for row in rows for s in row) == sorted(s.name for s in given_spans)
    for row in rows:
        for i, a in enumerate(row):
            for b in row[i + 1 :]:
                assert b.began_s >= a.ended_s or b.ended_s <= a.ended_s


def unknown(message: object) -> list[str]:
    """Fields that Perfetto's schema has not."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = [type(message).__name__ for _ in UnknownFieldSet(message)]
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for part in value if not hasattr(value, "ListFields") else [value]:
                found += unknown(part)
    return found


def test_the_file_is_what_perfettos_schema_says(tmp_path: Path) -> None:
    ranks = [rank_of(n) for n in range(4)]
    file = write_perfetto(ranks, match(ranks), tmp_path / "a.perfetto-trace")
    trace = protos.Trace.FromString(file.read_bytes())
    assert trace.IsInitialized()
    assert unknown(trace) == []
    packets = list(trace.packet)
    named = [p.track_descriptor.name for p in packets if p.HasField("track_descriptor")]
    assert [name for name in named if name.startswith("rank")] == [f"rank {n}" for n in range(4)]
    assert {"comm", "engine", "Train/memory/allocated_bytes"} <= set(named)
    events = [p for p in packets if p.HasField("track_event")]
    begins = [p for p in events if p.track_event.type == protos.TrackEvent.TYPE_SLICE_BEGIN]
    ends = [p for p in events if p.track_event.type == protos.TrackEvent.TYPE_SLICE_END]
    assert len(begins) == len(ends) == 4 * 30
    flows = [tuple(p.track_event.flow_ids) for p in begins if p.track_event.name == "comm/all_reduce"]
    assert sorted(flows) == sorted((n,) for n in range(1, 11) for _ in range(4))
    for track in {p.track_event.track_uuid for p in events}:
        mine = [p for p in events if p.track_event.track_uuid == track]
        assert [p.timestamp for p in mine] == sorted(p.timestamp for p in mine)
        depth = 0
        for p in mine:
            depth += {protos.TrackEvent.TYPE_SLICE_BEGIN: 1, protos.TrackEvent.TYPE_SLICE_END: -1}.get(
                p.track_event.type, 0
            )
            assert depth >= 0


def written(folder: Path, ranks: int = 4) -> None:
    for number in range(ranks):
        sink = JsonlSink(folder / "trace.jsonl", rank=number)
        for span in rank_of(number).spans:
            attrs = {"key": span.group, "place": span.place} if span.group else {}
            sink.write(Measurement(RecordKind.SPAN, span.name, span.seconds, 1, None, span.began_s, attrs))
            if span.name == "engine/step":
                sink.write(
                    Measurement(RecordKind.GAUGE, metric_names.MEMORY, 1e8 + 1e6 * number, 1, None, span.ended_s)
                )
        sink.close()


def test_the_command_reads_the_files_of_ranks_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path)
    parser = argparse.ArgumentParser()
    cli.register(parser)
    assert cli.main(parser.parse_args(["trace", str(tmp_path)])) == 0
    said = capsys.readouterr().out
    assert "4 ranks, 10 collectives matched" in said
    assert "straggler: rank 2, for which the others waited 47.0 ms" in said
    assert (tmp_path / "merged.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(parser.parse_args(["trace", str(tmp_path), "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["collectives"], told["straggler"]) == ([0, 1, 2, 3], 10, 2)
    assert told["lateness"][0]["rank"] == 2
    assert len(protos.Trace.FromString((tmp_path / "merged.perfetto-trace").read_bytes()).packet) > 240


def test_traces_of_torchs_profiler_are_read(tmp_path: Path) -> None:
    for number in (0, 1):
        args = {"Collective name": "allreduce", "Process Group Name": "0"}
        events = [
            {"ph": "X", "name": "record_param_comms", "ts": 10.0 * n, "dur": 2, "tid": 7, "args": args} for n in (1, 2)
        ]
        events.append({"ph": "i", "name": "not a span", "ts": 1})
        trace = {"traceEvents": events, "baseTimeNanoseconds": 10**18, "distributedInfo": {"rank": number}}
        with gzip.open(tmp_path / f"worker{number}.json.gz", "wt") as file:
            json.dump(trace, file)
    assert [(c.name, c.place) for c in match(read_ranks(tmp_path))] == [("comm/allreduce", 1), ("comm/allreduce", 2)]


def test_a_folder_without_traces_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ConfigError, match="no file with spans") as caught:
        read_ranks(tmp_path)
    assert '"ranks": "all"' in caught.value.fix
    written(tmp_path / "one", 1)
    written(tmp_path / "two", 1)
    with pytest.raises(ConfigError, match="both are of rank 0"):
        read_ranks(tmp_path)
