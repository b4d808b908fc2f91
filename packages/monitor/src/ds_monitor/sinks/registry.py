"""Find a sink by name: ours and third parties', by entry points of the group `ds_monitor.sinks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_config.errors import UnsupportedError
from ds_config.names import nearest
from ds_monitor.api import Sink

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "make_sink", "sink_names"]

GROUP = "ds_monitor.sinks"


def sink_names() -> list[str]:
    """Names that `make_sink` takes. Reads package metadata, imports no sink."""
    return sorted(_points())


def make_sink(name: str, **options: Any) -> Sink:
    """Make the sink that some installed package registered as `name`; `options` go to its constructor.

    Raises:
        UnsupportedError: no package registers it ("monitor-sink").
    """
    points = _points()
    if name in points:
        sink: Sink = points[name].load()(**options)
        return sink
    hint = "".join(f"Did you mean `{near}`? " for near in nearest(name, points))
    raise UnsupportedError(
        f"no monitor sink is called `{name}`; installed: {', '.join(sorted(points)) or 'none'}",
        code="monitor-sink",
        fix=f"{hint}Name one of these, or install the package that brings it (entry point group {GROUP}).",
    )


def _points() -> dict[str, EntryPoint]:
    # Importing importlib.metadata costs more than all of ds_monitor; only who asks for a sink by name pays it.
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}
