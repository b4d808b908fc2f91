"""The spans of all ranks of a run, put together: which collectives are the same one, who came late, one file and one picture.

runs = read_ranks(folder)          # what each rank's files tell
calls = match(runs)                # the same collective on all its ranks
late = lateness(calls)             # who let others wait
write_perfetto(runs, calls, path)  # open it with https://ui.perfetto.dev
"""

from __future__ import annotations

from ds_monitor.tracing.matching import Collective, Lateness, lateness, match, offsets, straggler
from ds_monitor.tracing.perfetto import write_perfetto
from ds_monitor.tracing.trace_reader import Rank, Span, read_ranks

__all__ = [
    "Collective",
    "Lateness",
    "Rank",
    "Span",
    "lateness",
    "match",
    "offsets",
    "read_ranks",
    "straggler",
    "write_perfetto",
]
