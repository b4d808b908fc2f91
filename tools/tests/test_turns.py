"""Engines that take turns in a benchmark: what is counted, and what a failure costs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RANK = """
import json, os, sys
speed, dies = float(sys.argv[1]), int(sys.argv[2])
print("noise", json.dumps({}), flush=True)
print(json.dumps({"ready": True}), flush=True)
for turn, line in enumerate(sys.stdin):
    if turn == dies:
        sys.exit("out of luck")
    first, count = map(int, line.split())
    slow = speed * (1 + int(os.environ["RANK"]))
    print(json.dumps({"ms": [1000.0] + [slow + first] * (count - 1), "cpu_ms": [slow] * count}), flush=True)
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    import turns

    return turns


def _engine(turns, speed, dies=-1, world=2):
    return lambda: turns.Ranks([sys.executable, "-c", RANK, str(speed), str(dies)], world, interactive=True)


def test_a_step_is_the_slowest_ranks_and_the_first_of_a_turn_is_not_counted(turns):
    found = turns.meet({"fast": _engine(turns, 1), "slow": _engine(turns, 5)}, cycles=2, count=4)
    assert [c["ms"] for c in found["fast"]] == [2 + 4, 2 + 8]
    assert [c["ms"] for c in found["slow"]] == [10 + 4, 10 + 8]
    assert [c["cpu_ms"] for c in found["fast"]] == [1.5, 1.5]


def test_an_engine_that_dies_leaves_and_the_others_go_on(turns, capsys):
    found = turns.meet({"good": _engine(turns, 1), "bad": _engine(turns, 1, dies=1)}, cycles=3, count=2)
    assert list(found) == ["good"]
    assert len(found["good"]) == 3
    assert "bad left: rank 0: ['out of luck']" in capsys.readouterr().out


def test_an_engine_that_never_answers_is_killed(turns, monkeypatch, capsys):
    monkeypatch.setattr(turns, "LIMIT_S", 0.3)
    stuck = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert turns.meet({"stuck": lambda: turns.Ranks(stuck, 1, interactive=True)}, cycles=1, count=1) == {}
    assert "stuck left" in capsys.readouterr().out
