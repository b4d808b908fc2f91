"""Find a sink by name: ours and third parties', by entry points of the group `ds_monitor.sinks`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_config.did_you_mean import nearest
from ds_config.errors import ConfigError, UnsupportedError
from ds_monitor.recording import Sink

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "make_sink", "sink_names", "takes_rank"]

GROUP = "ds_monitor.sinks"


def sink_names() -> list[str]:
    """Names that `make_sink` takes. Reads package metadata, imports no sink."""
    return sorted(_points())


def make_sink(name: str, **options: Any) -> Sink:
    """Make the sink that some installed package registered as `name`; `options` go to its constructor.

    Raises:
        UnsupportedError: no package registers it ("monitor-sink").
        ConfigError: it has no such option, or needs one that is not given ("monitor-sink-options").
    """
    maker = _maker(name)
    _check(name, maker, options)
    return maker(**options)


def takes_rank(name: str) -> bool:
    """Whether a sink has an option `rank`, by which one on each rank keeps to files, ports or runs of its own."""
    return "rank" in inspect.signature(_maker(name)).parameters


def _maker(name: str) -> Callable[..., Sink]:
    points = _points()
    if name in points:
        maker: Callable[..., Sink] = points[name].load()
        return maker
    hint = "".join(f"Did you mean `{near}`? " for near in nearest(name, points))
    raise UnsupportedError(
        f"no monitor sink is called `{name}`; installed: {', '.join(sorted(points)) or 'none'}",
        code="monitor-sink",
        fix=f"{hint}Name one of these, or install the package that brings it (entry point group {GROUP}).",
    )


def _check(name: str, maker: Callable[..., Sink], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(maker)
    try:
        signature.bind(**options)
    except TypeError as error:
        free = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        named = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [] if free else [option for option in options if option not in named]
        hint = "".join(f"Did you mean `{near}`? " for option in unknown for near in nearest(option, named))
        raise ConfigError(
            f"the sink `{name}` cannot be made with the options {sorted(options)}: {error}",
            code="monitor-sink-options",
            fix=f"{hint}It takes {', '.join(named) or 'none'}.",
        ) from error


def _points() -> dict[str, EntryPoint]:
    # Importing importlib.metadata costs more than all of ds_monitor; only who asks for a sink by name pays it.
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}
