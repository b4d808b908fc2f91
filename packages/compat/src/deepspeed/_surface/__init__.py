"""The surface: what each public name of DeepSpeed 0.19.8 is here.

`surface.json` is the table: the modules of this package are made from it (`deepspeed._finder`), and so is
docs/reference/deepspeed-surface.md. A name of DeepSpeed without a row is refused for the reason of the part it is in
(`upstream_names`). Of a module the table says, names separated by spaces:

    "ds_zero": "Init there=here"   names of that module, one of them under another name; `_ours` is below this package,
                                   and `there=` is the module itself
    "INTERNAL": "..."              names that are refused, for the reason "INTERNAL" of `refused`
    "as": "..."                    modules and `groups` whose rows this module has, too
    "same": "..."                  constants whose value is their name in small letters
    "constants": {...}             other constants: names of configuration keys and of checkpoint entries, and defaults

`refused` has the reasons, what to use instead, and the `parts` of DeepSpeed that a reason speaks for; `engine` the
attributes that upstream's engine has and this one has not; `earlier` modules of earlier releases that programs still name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import get_data
from typing import Any

__all__ = ["EARLIER", "MISSING_ATTRIBUTES", "PARTS", "REASONS", "SURFACE", "ConstantRow", "Missing", "Rows"]


@dataclass(frozen=True, slots=True)
class Missing:
    """A name that exists upstream and not here.

    Attributes:
        why: The reason, as the second half of "NAME is not here: ...".
        instead: What to use.
    """

    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class ConstantRow:
    """A name that stands for plain data."""

    value: object


Row = str | Missing | ConstantRow
"""`"module:attribute"`, `"module:"` for the module itself, or one of the two classes."""
Rows = Mapping[str, Row]

_TABLE: Mapping[str, Any] = json.loads(get_data(__name__, "surface.json") or b"")
REASONS: Mapping[str, Missing] = {
    name: Missing(reason["why"], reason["instead"]) for name, reason in _TABLE["refused"].items()
}


def _rows(entry: Mapping[str, Any]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for home, names in entry.items():
        if home == "as":
            for other in names.split():
                rows |= _rows(_TABLE["groups"].get(other) or _TABLE["modules"][other])
        elif home == "constants":
            rows |= {name: ConstantRow(_value(value)) for name, value in names.items()}
        elif home == "same":
            rows |= {name: ConstantRow(name.lower()) for name in names.split()}
        elif home in REASONS:
            rows |= dict.fromkeys(names.split(), REASONS[home])
        else:
            rows |= dict(_row(home, name) for name in names.split())
    return rows


def _value(value: Any) -> object:
    return tuple(value["tuple"]) if isinstance(value, dict) else value  # which JSON has no word for


def _row(home: str, word: str) -> tuple[str, Row]:
    name, renamed, attribute = word.partition("=")
    module = f"deepspeed.{home}" if home.startswith("_ours.") else home
    return name, f"{module}:{attribute if renamed else name}"


SURFACE: Mapping[str, Rows] = {module: _rows(entry) for module, entry in _TABLE["modules"].items()}
MISSING_ATTRIBUTES: Mapping[str, Missing] = {name: REASONS[reason] for name, reason in _TABLE["engine"].items()}
"""Attributes of upstream's engine that this one does not have."""
PARTS: Mapping[str, Missing] = {
    part: REASONS[name]
    for name, reason in _TABLE["refused"].items()
    if "parts" in reason
    for part in reason["parts"].split(" ")
}
"""Beginnings of paths below the package, and why what begins so is not here; "" is all else."""
EARLIER: str = _TABLE["earlier"]
