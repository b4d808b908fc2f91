"""What is compared takes turns: calls of one process, or processes that answer a line with a line."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Times = dict[str, list[float]]
"""Seconds of each name, one for each round."""


def seconds(call: Callable[[], object]) -> float:
    """Return what a call took."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def in_turn(measures: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: bool = True) -> dict[str, list[T]]:
    """Return what each of the measures says, in turn so many times; a round before warms up and does not count."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(-1 if warm_up else 0, rounds):
        for name, measure in measures.items():
            said = measure()
            if number >= 0:
                found[name].append(said)
    return found


def ratio(times: Mapping[str, Sequence[float]], theirs: str, ours: str) -> float:
    """Return how many times as long as ours theirs took: the median of the rounds."""
    return statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))


class Answering:
    """A process that says a line of JSON when it is ready, and one for every line that it is given (`workers/answering.py`)."""

    def __init__(self, command: Sequence[object], **env: str) -> None:
        self._words = [str(word) for word in command]
        self._process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env
        )
        self.first = self._answer()

    def ask(self, line: str) -> Any:
        """Return the answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"ended with {self._process.wait()}: {' '.join(self._words)}")
