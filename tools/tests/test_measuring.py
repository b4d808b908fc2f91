"""What a benchmark's record says of the processors while it ran."""

from __future__ import annotations

import json
import os
from pathlib import Path

from repo.measuring import Spent, keep, said


def test_own_children_are_not_others() -> None:
    before, after = Spent(0.0, 100.0, 5.0, 10.0), Spent(50.0, 185.0, 6.0, 90.0)
    assert said(before, after, 2) == "50 s; others took 5.0% of 2 processors, the host 1.0%"
    assert "others took 0.0%" in said(before, Spent(50.0, 150.0, 5.0, 90.0), 2)


def test_only_records_that_were_written_get_the_line(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    times = {old: old.stat().st_mtime_ns}
    new.write_text(json.dumps({"rows": [1], "alone": {"x first": "10 s"}}))
    assert keep(tmp_path, times, "x second", "20 s") == [new]
    assert json.loads(new.read_text()) == {"rows": [1], "alone": {"x first": "10 s", "x second": "20 s"}}
    os.utime(old, ns=(1, 1))
    assert old in keep(tmp_path, times, "x", "30 s")


def test_the_processors_of_this_machine_are_read() -> None:
    first = Spent.now()
    second = Spent.now()
    assert second.wall >= first.wall
    assert second.busy >= first.busy > 0
