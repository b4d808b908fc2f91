"""Which process failed first, and what to show of it. Pure: times are whatever increases, lines are bytes.

When one rank raises, the others fail milliseconds later because it is gone, and may well exit before it does: it is still
tearing down. So the moment of a failure is not the exit but the traceback's first line, where there is one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ending", "closing_lines", "exit_status", "explain", "failed_at", "first_failure", "starts_traceback"]

_RECENT_S = 10.0  # an older traceback was handled and logged; it is not why the process ended
_HEADER = b"Traceback (most recent call last):"
_CHAINED = (b"The above exception was the direct cause", b"During handling of the above exception")
_NATIVE_LOG = re.compile(rb"^(\[rank\d+\]:\s*)?\[[A-Z]\d{3,4} ")  # torch's C++ log, written while it is torn down


@dataclass(frozen=True, slots=True)
class Ending:
    """How one process ended.

    Attributes:
        index: its position in the launch.
        code: exit code; negative: the signal that ended it.
        ended_s: when it ended.
        traceback_s: when the first line of its last traceback was read; None: it wrote none.
        stop_requested: whether we had asked it to stop before it ended.
    """

    index: int
    code: int
    ended_s: float
    traceback_s: float | None = None
    stop_requested: bool = False


def failed_at(ending: Ending) -> float:
    """Return the time of failure: of the traceback if the process ended because of it, else of the exit."""
    recent = ending.traceback_s is not None and ending.ended_s - ending.traceback_s <= _RECENT_S
    return ending.traceback_s if recent and ending.code > 0 and ending.traceback_s is not None else ending.ended_s


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """Return the ending of the process that failed first without being asked to stop; None when none did."""
    return min((e for e in endings if e.code != 0 and not e.stop_requested), key=failed_at, default=None)


def exit_status(code: int) -> int:
    """Return the shell's exit status: 128 + signal for a process that a signal ended."""
    return 128 - code if code < 0 else code


def explain(code: int) -> str:
    """`exit code 1`, or the signal's name and its usual cause."""
    if code >= 0:
        return f"exit code {code}"
    known = {signal.SIGKILL: "kill -9, or the kernel was out of memory", signal.SIGSEGV: "a crash in native code"}
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{number.name}: {known[number]}" if number in known else number.name


def starts_traceback(line: bytes) -> bool:
    """Whether a line of standard error begins a Python traceback (torch puts `[rank0]: ` before it)."""
    return _HEADER in line


def closing_lines(tail: Sequence[bytes], fallback: int = 20) -> list[bytes]:
    """Return the last traceback in `tail` with those it is chained to; else the last `fallback` lines.

    Lines that native code logs after the traceback are left out.
    """
    headers = [i for i, line in enumerate(tail) if starts_traceback(line)]
    if not headers:
        return list(tail[-fallback:])
    start = headers.pop()
    while headers and any(mark in line for line in tail[headers[-1] : start] for mark in _CHAINED):
        start = headers.pop()
    lines = list(tail[start:])
    end = next((i for i, line in enumerate(lines) if _NATIVE_LOG.match(line)), len(lines))
    return lines[:end]
