"""Formulas, and what the logger makes of spans."""

from __future__ import annotations

import logging

import pytest

from ds_comm.bandwidth import bandwidth, message_bytes
from ds_comm.config import CommsLoggerConfig
from ds_comm.logger import CommsLogger, table
from ds_config import ConfigError, validate
from ds_monitor import Measurement, RecordKind


def span(op: str, seconds: float, nbytes: int = 1000, ranks: int = 4, unit: str = "") -> Measurement:
    attrs = {"unit": unit, "group": "world", "ranks": ranks, "nbytes": nbytes, "dtype": "float32"}
    return Measurement(RecordKind.SPAN, f"comm/{op}", seconds, 0, None, 0.0, attrs)


@pytest.mark.parametrize(
    ("op", "algorithm", "bus"),
    [
        ("all_reduce", 8.0, 12.0),  # 2 (n-1)/n with n = 4
        ("all_gather_single", 32.0, 24.0),  # the message is everyone's part
        ("reduce_scatter_single", 8.0, 6.0),
        ("all_to_all_single", 8.0, 6.0),
        ("broadcast", 8.0, 8.0),
        ("send", 8.0, 8.0),
    ],
)
def test_bandwidths_of_a_gigabyte_in_a_second(op: str, algorithm: float, bus: float) -> None:
    found = bandwidth(op, 10**9, 4, 1.0)
    assert found.algorithm_gbps == pytest.approx(algorithm)
    assert found.bus_gbps == pytest.approx(bus)


def test_bandwidth_of_nothing_is_zero() -> None:
    assert bandwidth("barrier", 0, 2, 0.0).bus_gbps == 0
    assert bandwidth("barrier", 0, 2, 1.0).bus_gbps == 0
    assert message_bytes("all_gather_single", 10, 4) == 40
    assert message_bytes("all_reduce", 10, 4) == 10


def test_operations_are_counted_by_name_size_and_ranks() -> None:
    logger = CommsLogger()
    for record in [
        span("all_reduce", 1e-3),
        span("all_reduce", 3e-3),
        span("all_reduce", 1e-3, nbytes=2000),
        span("all_reduce", 1e-3, ranks=2),
        span("all_gather_single", 1e-3, nbytes=250),
        Measurement(RecordKind.SPAN, "step", 1.0, 0, None, 0.0, {}),
        Measurement(RecordKind.GAUGE, "comm/x", 1.0, 0, None, 0.0, {}),
    ]:
        logger.write(record)
    rows = logger.summary()
    assert [(row.op, row.message_bytes, row.ranks, row.count) for row in rows] == [
        ("all_gather_single", 1000, 4, 1),
        ("all_reduce", 1000, 2, 1),
        ("all_reduce", 1000, 4, 2),
        ("all_reduce", 2000, 4, 1),
    ]
    assert rows[2].total_ms == pytest.approx(4.0)
    assert rows[2].average_ms == pytest.approx(2.0)
    assert rows[2].algorithm_gbps == pytest.approx(1000 * 8 / 2e-3 / 1e9)
    assert rows[0].bus_gbps == pytest.approx(1000 * 8 / 1e-3 / 1e9 * 3 / 4)
    logger.reset()
    assert not logger.has_data()
    logger.close()


def test_only_named_operations_and_units() -> None:
    logger = CommsLogger(CommsLoggerConfig(enabled=True, prof_all=False, prof_ops=("broadcast", "layers.1")))
    for record in [span("all_reduce", 1.0), span("broadcast", 1.0), span("all_reduce", 1.0, unit="layers.1")]:
        logger.write(record)
    assert [row.op for row in logger.summary()] == ["all_reduce", "broadcast"]
    assert [row.count for row in logger.summary()] == [1, 1]
    logger.close()


def test_debug_counts_units_apart_and_keeps_the_formula() -> None:
    logger = CommsLogger(CommsLoggerConfig(enabled=True, debug=True))
    logger.write(span("all_reduce", 1.0, unit="a"))
    logger.write(span("all_reduce", 1.0, unit="b"))
    rows = logger.summary()
    assert [row.op for row in rows] == ["all_reduce[a]", "all_reduce[b]"]
    assert rows[0].bus_gbps == pytest.approx(rows[0].algorithm_gbps * 1.5)
    logger.close()


def test_verbose_logs_each(caplog: pytest.LogCaptureFixture) -> None:
    logger = CommsLogger(CommsLoggerConfig(enabled=True, verbose=True))
    with caplog.at_level(logging.INFO, logger="ds_comm"):
        logger.write(span("all_reduce", 1e-3, unit="layers.0"))
    assert "all_reduce[layers.0] 1000 bytes, 4 ranks: 1.000 ms" in caplog.text
    logger.close()


def test_the_table_in_a_world_of_one() -> None:
    logger = CommsLogger()
    for seconds in (1e-3, 2e-3):
        logger.write(span("all_reduce", seconds, nbytes=1 << 20))
    text = logger.log_summary(show_straggler=True)
    head, row = text.splitlines()
    assert head.split("  ")[0] == "Comm. Op"
    assert "Straggler(ms)" in head
    assert "1 MiB" in row
    assert row.split()[-1] == "0.00", "alone, nobody comes late"
    assert table([]).startswith("Comm. Op")
    assert logger.as_dict()["summary"][0]["count"] == 2
    logger.close()


def test_the_section_of_the_configuration() -> None:
    assert validate(CommsLoggerConfig, {"enabled": True, "prof_ops": ["all_reduce"]}).prof_ops == ("all_reduce",)
    with pytest.raises(ConfigError, match="prof_ops"):
        validate(CommsLoggerConfig, {"prof_op": []})
