"""A record that people fill in by hand refuses what has no meaning, with all of it in one message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pytest

from ds_config.errors import PlanError
from ds_config.option_checks import check_options


class Speaks(Protocol):
    def speak(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Options:
    clip: float | None = None
    count: int = 2
    ratio: float = 0.5
    mode: Literal["auto", "private"] = "auto"
    strict: bool = False
    names: tuple[str, ...] = ()
    table: Mapping[str, int] = field(default_factory=dict)
    call: Callable[[], None] | None = None
    voice: Speaks | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        check_options(self, clip="> 0", count=">= 1", ratio=">= 0, <= 1")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"clip": -1.0}, "clip is -1.0, expected a number > 0"),
        ({"clip": math.nan}, "clip is nan"),
        ({"clip": "1"}, "clip is '1', expected a number or None"),
        ({"clip": True}, "clip is True"),
        ({"clip": 1 + 2j}, "clip is"),
        ({"count": 0}, "count is 0, expected a number >= 1"),
        ({"count": 1.5}, "count is 1.5, expected an integer"),
        ({"count": None}, "count is None"),
        ({"ratio": 1.5}, "ratio is 1.5, expected a number >= 0, <= 1"),
        ({"mode": "AUTO"}, "mode is 'AUTO', expected 'auto' or 'private'"),
        ({"strict": "yes"}, "strict is 'yes', expected True or False"),
        ({"strict": 1}, "strict is 1"),
        ({"names": "ab"}, "names is 'ab', expected tuple"),
        ({"names": ("a", 3)}, "names is .*expected tuple"),
        ({"table": []}, r"table is \[\], expected Mapping"),
        ({"call": 3}, "call is 3"),
        ({"count": 0, "mode": 3}, "count is 0.*; mode is 3"),
    ],
)
def test_what_has_no_meaning_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        Options(**keys)
    assert caught.value.code == "config-option"
    assert str(caught.value).startswith("Options: ")


def test_what_has_one_is_taken() -> None:
    Options(clip=math.inf, count=1, ratio=0, names=["a"], table={"a": 1}, call=lambda: None, voice=object())  # type: ignore[arg-type]
