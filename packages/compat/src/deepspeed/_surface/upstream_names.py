"""The names of DeepSpeed 0.19.8 that the table decides nothing about: each is refused, for the reason of the part of DeepSpeed it is in.

`upstream.json` has all of them; `tools/upstream.py` makes it from DeepSpeed's sdist. It is read when a name is first asked for that has no row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from deepspeed._surface import EARLIER, PARTS, REASONS, Missing

__all__ = ["configuration_fields", "reason_of", "refused_name", "upstream_modules"]


@cache
def _names() -> Mapping[str, Mapping[str, str]]:
    names: dict[str, dict[str, str]] = json.loads((files(__package__) / "upstream.json").read_text(encoding="utf-8"))
    names["modules"] |= dict.fromkeys((f"deepspeed.{module}" for module in EARLIER.split()), "")
    return names


def upstream_modules() -> Mapping[str, str]:
    """Return the modules of DeepSpeed, those of earlier releases too, each with its public names separated by spaces."""
    return _names()["modules"]


def configuration_fields() -> Mapping[str, str]:
    """Return the classes that read DeepSpeed's configuration, each with its keys separated by spaces."""
    return _names()["fields"]


def reason_of(path: str) -> Missing:
    """Return why a module or name of DeepSpeed is not here, and what to use, from its full path."""
    inner = path.removeprefix("deepspeed").removeprefix(".")
    if inner.rpartition(".")[2].isupper():
        return REASONS["CONSTANT"]
    return PARTS[max((part for part in PARTS if inner.startswith(part)), key=len)]


def refused_name(module: str, name: str) -> Missing | None:
    """Return why a name without a row is refused; None where DeepSpeed has neither such a name nor such a module."""
    path = f"{module}.{name}"
    known = path in upstream_modules() or name in upstream_modules().get(module, "").split()
    return reason_of(path) if known else None
