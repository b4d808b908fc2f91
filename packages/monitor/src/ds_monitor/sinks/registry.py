"""Find a sink by name: ours and third parties', by entry points of the group `ds_monitor.sinks`."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import Any

from ds_config.errors import UnsupportedError
from ds_monitor.api import Sink

__all__ = ["GROUP", "make_sink", "sink_names"]

GROUP = "ds_monitor.sinks"


def sink_names() -> list[str]:
    """Names that `make_sink` takes. Reads package metadata, imports nothing."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def make_sink(name: str, **options: Any) -> Sink:
    """Make the sink that some installed package registered as `name`; `options` go to its constructor.

    Raises:
        UnsupportedError: no package registers it ("monitor-sink").
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            sink: Sink = point.load()(**options)
            return sink
    names = sink_names()
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    raise UnsupportedError(
        f"no monitor sink is called `{name}`; installed: {', '.join(names)}",
        code="monitor-sink",
        fix=f"{hint}Name one of these, or install the package that brings it (entry point group {GROUP}).",
    )
