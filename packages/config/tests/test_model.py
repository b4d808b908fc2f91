"""What StrictModel takes, the same from Python and from a document."""

from __future__ import annotations

import enum
import math
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from ds_config import StrictModel, load
from ds_config.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Types(StrictModel):
    integer: int = 1
    maybe_integer: int | None = None
    number: float = 1.0
    either: int | float = 1
    flag: bool = False
    text: str = ""
    stage: Literal[0, 1, 2] = 0
    mode: Literal["a", "b"] | bool = "a"
    colour: Colour = Colour.RED
    path: Path | None = None
    pair: tuple[int, float] = (1, 1.0)
    many: tuple[int, ...] = ()
    unique: frozenset[str] = frozenset()
    listed: list[int] = []  # noqa: RUF012
    mapped: dict[str, int] = {}  # noqa: RUF012
    free: Any = None


ACCEPTED = [
    ("integer", 16.0, 16),
    ("integer", 5e8, 500_000_000),
    ("integer", 10**30, 10**30),
    ("maybe_integer", 2.0, 2),
    ("maybe_integer", None, None),
    ("number", 3, 3.0),
    ("number", 0.5, 0.5),
    ("either", 2.0, 2.0),
    ("flag", True, True),
    ("text", "x", "x"),
    ("stage", 2, 2),
    ("stage", 2.0, 2),
    ("mode", False, False),
    ("mode", "b", "b"),
    ("colour", "blue", Colour.BLUE),
    ("path", "/tmp/x", Path("/tmp/x")),
    ("pair", [1.0, 2], (1, 2.0)),
    ("many", [1, 2.0], (1, 2)),
    ("unique", ["a"], frozenset({"a"})),
    ("listed", [1.0, 2], [1, 2]),
    ("mapped", {"a": 2.0}, {"a": 2}),
    ("free", 16.0, 16.0),
    ("free", {"a": [1.5, "x"]}, {"a": [1.5, "x"]}),
]
REFUSED = [
    ("integer", 1.5, "an integer"),
    ("integer", "1", "an integer"),
    ("integer", True, "an integer"),
    ("integer", None, "an integer"),
    ("integer", 1e300, "an integer"),
    ("integer", [1], "an integer"),
    ("maybe_integer", "none", "an integer or null"),
    ("number", "0.1", "a number"),
    ("number", True, "a number"),
    ("number", math.nan, "a number"),
    ("number", math.inf, "a number"),
    ("either", True, "an integer or a number"),
    ("flag", 1, "true or false"),
    ("flag", "true", "true or false"),
    ("text", 1, "a text"),
    ("stage", 3, "0, 1 or 2"),
    ("stage", True, "0, 1 or 2"),
    ("stage", "1", "0, 1 or 2"),
    ("mode", 0, '"a", "b" or true or false'),
    ("colour", "green", '"red" or "blue"'),
    ("path", 3, "a path or null"),
    ("pair", [1], "a list of 2 (an integer, a number)"),
    ("many", ["1"], "an integer"),
    ("many", "12", "a list of (an integer)"),
    ("listed", {"a": 1}, "a list of (an integer)"),
    ("mapped", [1], "an object"),
    ("mapped", {"a": "1"}, "an integer"),
]


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED)
def test_accepted(name: str, value: Any, expected: Any) -> None:
    got = getattr(load(Types, {name: value}), name)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED)
def test_accepted_from_python(name: str, value: Any, expected: Any) -> None:
    got = getattr(Types(**{name: value}), name)
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Types, {name: value})
    assert caught.value.code == "config-value"
    (issue,) = caught.value.issues
    assert issue.path[0] == name
    assert f"expected {expected}" in issue.message


@pytest.mark.parametrize(("name", "value", "_expected"), REFUSED)
def test_refused_from_python(name: str, value: Any, _expected: str) -> None:
    with pytest.raises(ValidationError):
        Types(**{name: value})


def test_frozen_and_closed() -> None:
    model = Types()
    with pytest.raises(ValidationError, match="frozen"):
        model.integer = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Types(integr=2)  # type: ignore[call-arg]


def test_defaults_are_checked() -> None:
    class Wrong(StrictModel):
        count: int = "3"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="count: found null, expected an integer"):
        load(Wrong, {})


def test_python_objects_pass_through_untouched() -> None:
    class Held:
        pass

    class Holder(StrictModel):
        held: Held | None = None
        where: PurePosixPath = PurePosixPath("/")

    held = Held()
    assert load(Holder, {"held": held}).held is held
    with pytest.raises(ConfigError, match="expected Held or null"):
        load(Holder, {"held": 3})


def test_the_model_that_fits_is_chosen_in_a_union() -> None:
    class File(StrictModel):
        kind: Literal["file"]
        path: str

    class Memory(StrictModel):
        kind: Literal["memory"]
        size: int = 0

    class Store(StrictModel):
        where: bool | File | Memory = False

    assert load(Store, {"where": {"kind": "memory", "size": 2.0}}).where == Memory(kind="memory", size=2)
    assert load(Store, {"where": True}).where is True
    with pytest.raises(ConfigError) as caught:
        load(Store, {"where": {"kind": "memory", "sze": 2, "size": "x"}})
    messages = [str(issue) for issue in caught.value.issues]
    assert messages == [
        "where.sze: is unknown; did you mean 'size'?",
        'where.size: found "x", expected an integer.',
    ]
