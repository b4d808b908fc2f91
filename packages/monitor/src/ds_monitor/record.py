"""The one value that passes from the code that measures to the sinks that show it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Measurement", "RecordKind"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class RecordKind(Enum):
    """What `Measurement.value` means."""

    SPAN = "span"  # seconds between enter and exit
    COUNTER = "counter"  # how much was added now; a sink that wants the total sums
    GAUGE = "gauge"  # the value itself; the last one of a step is the one that counts
    EVENT = "event"  # nothing (0.0); an event is its name, its time and its attributes
    HISTOGRAM = "histogram"  # how many values there were; attributes `edges`, `counts`, `min`, `max`, `sum`, `sum_squares`, `nonfinite`
    TEXT = "text"  # nothing (0.0); the attribute `text`


class Measurement(NamedTuple):
    """One measurement, placed on the axis of training. A tuple, which is made four times as fast as a frozen dataclass.

    Attributes:
        name: `/`-separated path, such as `Train/Samples/train_loss` or `comm/all_reduce`.
        value: see `RecordKind`.
        step: optimizer steps done when this was measured, as last told by `set_step`; 0 before.
        samples: training samples seen by then; None when nobody said.
        time_s: seconds since the epoch; for a span, of its start.
        attrs: what the caller added by keyword. Never changed after the record is made.
    """

    kind: RecordKind
    name: str
    value: float
    step: int
    samples: int | None
    time_s: float
    attrs: Mapping[str, Any] = _NOTHING
