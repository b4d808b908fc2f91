"""Compare the whole configuration over ranks: one with another stage, clipping or rate would train another model, or wait for ever."""

from __future__ import annotations

from typing import Any

from ds_comm import Group, find_differences
from ds_config.errors import PlanError
from ds_engine.config import Config
from ds_monitor.config import MonitorConfig

__all__ = ["check_configuration", "comparable"]

_LOGS = ("steps_per_print", "dump_state", "log_level", "memory_breakdown", "flops_profiler", "comms_logger")
_OF_ONE_RANK = frozenset({*MonitorConfig.model_fields, *_LOGS, "aio"})
_PLACES = ("path", "_dir", "folder", "output_file")
_LOG_SWITCHES = ("verbose", "debug_log", "activation_checkpointing.profile")
_OF_ONE_HOST = ("num_workers", "pin_memory")


def comparable(config: Config) -> dict[str, str]:
    """Return the values of a configuration as text by dotted key, without what may differ between ranks.

    Logs, sinks and places on disk may, and how a host reads its samples.
    """
    values: dict[str, str] = {}
    for key, value in config.model_dump(mode="json").items():
        if key not in _OF_ONE_RANK:
            _collect(key, value, values)
    return values


def _collect(key: str, value: Any, values: dict[str, str]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _collect(f"{key}.{name}", item, values)
    elif not key.endswith((*_PLACES, *_LOG_SWITCHES, *_OF_ONE_HOST)):
        values[key] = repr(value)


def check_configuration(config: Config, group: Group) -> None:
    """Raise on every rank if the ranks were given different configurations. Collective over `group`.

    Raises:
        PlanError: with the keys that differ, and their values on two ranks ("engine-ranks-differ").
    """
    differing = find_differences(comparable(config), group, unit="initialize")
    if not differing:
        return
    lines = []
    for key, values in list(differing.items())[:8]:
        other = next(i for i, value in enumerate(values) if value != values[0])
        shown = [f"{values[i] or 'absent'} on rank {group.ranks[i]}" for i in (0, other)]
        lines.append(f"{key}: {' and '.join(shown)}")
    more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
    raise PlanError(
        "the ranks were given different configurations:\n  " + "\n  ".join(lines) + more,
        code="engine-ranks-differ",
        fix="Give every rank the same configuration; only logs, sinks, folders and workers may differ.",
    )
