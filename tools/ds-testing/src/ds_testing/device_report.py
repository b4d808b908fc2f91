"""Collects what ran on devices during a pytest run, prints the table, and writes the record of a card: `--devices-record FILE`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ds_testing.cards import CardBook
from ds_testing.device_table import DeviceRun, merge_record, package_of, render_table, summarize, to_record

__all__ = ["DeviceReport", "note_run"]

_PROPERTY = "device_run"


class DeviceReport:
    """A plugin of one pytest run.

    Attributes:
        runs: What has run.
    """

    def __init__(self, book: CardBook, record: Path | None) -> None:
        self.book, self.record = book, record
        self.runs: list[DeviceRun] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a case when its outcome is known: after its call, or where its start skipped or failed."""
        found = dict(report.user_properties).get(_PROPERTY)
        if found is None or not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
            return
        device, ranks, backend = json.loads(str(found))
        self.runs.append(DeviceRun(package_of(report.nodeid), device, ranks, backend, report.outcome, report.duration))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, and write the record where a card was there."""
        if self.record is None:
            return
        rows = summarize(self.runs)
        terminalreporter.section("devices")
        terminalreporter.write_line(render_table(rows))
        answers = {size: answer.text for size, answer in self.book.answers.items()}
        for size, text in sorted(answers.items()):
            terminalreporter.write_line(f"NCCL with {size} ranks on {self.book.cards} cards: {text}")
        facts = self.book.facts()
        if not facts:
            terminalreporter.write_line("no card here: nothing is written to the record")
            return
        before = json.loads(self.record.read_text()) if self.record.is_file() else []
        merged = merge_record(before, to_record(rows, facts, answers, datetime.now(UTC).date().isoformat()))
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(merged, indent=1) + "\n")


def note_run(item: pytest.Item, device: str, ranks: int, backend: str | None) -> None:
    """Attach to a test where it runs, for the table. A later note replaces an earlier one."""
    item.user_properties[:] = [pair for pair in item.user_properties if pair[0] != _PROPERTY]
    item.user_properties.append((_PROPERTY, json.dumps([device, ranks, backend or "own"])))
