"""The vocabulary for keys that have a history, written as `Annotated` metadata of a field.

    class Zero(StrictModel):
        prefetch_bucket_size: Annotated[int, Alias("stage3_prefetch_bucket_size")] = 50_000_000
        offload_optimizer: Offload | None = None
        cpu_offload: Annotated[bool, Deprecated("offload_optimizer", convert=as_offload)] = False
        load_from_fp32_weights: Annotated[bool, Dead("checkpoints always hold the master weights")] = True
        round_robin_gradients: Annotated[bool, Unbuilt("leave it out; units are balanced by size")] = False

A *retired* field (deprecated, dead, unbuilt) keeps its type, so that its value is still checked, and never holds anything
but its default after validation: read the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Alias", "Deprecated", "NoEffect", "Retired", "Unsupported", "retirement_note"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A second spelling of the field it stands on, accepted in silence. Giving both is an error."""

    name: str


@dataclass(frozen=True, slots=True)
class Deprecated:
    """The field was replaced: its value moves to `new`, with one warning. Giving both is an error.

    Attributes:
        new: The new place, dotted, as seen from the model that has the old field.
        convert: Old value to new value; the same value when None. It may raise ValueError with what is wrong.
    """

    new: str
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The field does nothing, here or where it came from: accepted with one line that says `why`, or what replaced it."""

    why: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The field is known elsewhere and not built here: any value but "off" is an error that says what to use `instead`.

    Off is: the field's default, null, an object with `"enabled": false` (or whose model says so by default), an object
    whose model has no `enabled` and holds nothing but its defaults, and false (where the default is not true: there false is what is not built).
    """

    instead: str


Retired = Deprecated | NoEffect | Unsupported


def retirement_note(reason: Retired, section: str = "") -> str:
    """Describe the effect of a retired key in `section` (dotted, empty for the outermost object)."""
    if isinstance(reason, Deprecated):
        return f"is deprecated: use {section + '.' if section else ''}{reason.new}"
    return f"has no effect: {reason.why}" if isinstance(reason, NoEffect) else f"is not built here: {reason.instead}"
