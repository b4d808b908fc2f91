"""What every engine of the inference benchmark is asked, and the loop that answers. No package of this project is imported here, so that
a peer's environment can.

Lines in: `decode N`: N tokens of one request; `first N`: the first token of a prompt of N; `batch N`: 32 ragged requests, N tokens each;
`read`: the read bandwidth of the machine; `resident`, `peak`: bytes that this process holds now, held at most. Lines out: JSON.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from typing import Any, Protocol

from answering import answering, serve

THREADS = int(os.environ.get("DS_BENCH_THREADS", "2"))
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 1024, 2816, 16, 8, 32000


class Engine(Protocol):
    """bytes: of the weights that one token reads."""

    bytes: int

    def run(self, prompts: list[list[int]], count: int) -> None: ...


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB) for _ in range(draw.randrange(16, 129))] for _ in range(32)]


def resident() -> float:
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()


def decode(made: Engine, count: int) -> float:
    """Seconds a token, once the prompt is computed."""
    begin = time.perf_counter()
    made.run([[5] * 8], 1)
    middle = time.perf_counter()
    made.run([[5] * 8], count + 1)
    return (time.perf_counter() - middle - (middle - begin)) / count


def run(make: Callable[[], Any]) -> None:
    """Make an engine and answer lines until there are none."""
    answer = answering()
    made = make()
    made.run([[1, 2, 3]], 2)
    answer({"bytes": made.bytes, "resident": resident()})

    def found(line: str) -> float:
        what, *rest = line.split()
        count = int(rest[0]) if rest else 0
        begin = time.perf_counter()
        if what == "decode":
            return decode(made, count)
        if what == "resident":
            return resident()
        if what == "peak":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        if what == "read":
            return float(made.read())
        made.run([[7] * count] if what == "first" else prompts(), 1 if what == "first" else count)
        return time.perf_counter() - begin

    serve(answer, found)
