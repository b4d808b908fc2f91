"""The error classes: what they print, and that they survive a process border."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest

from ds_config import errors, load
from ds_config.errors import (
    CheckpointError,
    ConfigError,
    DsError,
    PlanError,
    UnsupportedConfigError,
    UnsupportedError,
    set_place,
)

CLASSES = [getattr(errors, name) for name in errors.__all__ if inspect.isclass(getattr(errors, name))]


@pytest.fixture
def place() -> Iterator[str]:
    set_place("rank 3/8 data=1 pipeline=1")
    yield "rank 3/8 data=1 pipeline=1"
    set_place("")


def test_text_has_place_message_fix_and_page(place: str) -> None:
    error = PlanError("data 4 x tensor 2 = 8, world size 6.", code="mesh-size", fix="Set mesh.data = 3.")
    assert str(error) == (
        f"[{place}] data 4 x tensor 2 = 8, world size 6.\n  Set mesh.data = 3.\n  ds explain mesh-size"
    )
    set_place("")
    assert "rank" in str(error), "the place is that of the raise"
    assert str(PlanError("x", code="y")) == "x\n  ds explain y"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_a_ds_error_that_can_be_copied_and_sent(kind: type[DsError], place: str) -> None:
    error = kind("asked 1, found 2", code="some-code", fix="do this")
    error.add_note("seen by the launcher")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert (twin.message, twin.code, twin.fix, twin.place) == ("asked 1, found 2", "some-code", "do this", place)
        assert twin.args == error.args
        assert twin.__notes__ == ["seen by the launcher"]


def test_builtin_bases_that_callers_catch() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PlanError, ValueError)
    assert issubclass(CheckpointError, RuntimeError)
    assert issubclass(UnsupportedConfigError, ConfigError)
    assert issubclass(UnsupportedConfigError, UnsupportedError)


def test_issues_are_sent_with_the_error(train: type) -> None:
    with pytest.raises(ConfigError) as caught:
        load(train, '{"x": 1,\n"stag": 2}')
    twin = pickle.loads(pickle.dumps(caught.value))
    assert twin.issues == caught.value.issues
    assert len(twin.issues) == 2


def test_every_code_of_this_package_has_a_section() -> None:
    """The central page is generated from these files; here the package's own half is checked where the repository is at hand."""
    import re
    from pathlib import Path

    root = Path(__file__).parents[3]
    page = root / "docs/reference/errors.d/config.md"
    if not page.is_file():
        pytest.skip("the tests run outside the repository")
    sections = set(re.findall(r"^## (\S+)", page.read_text(), re.MULTILINE))
    sources = "\n".join(path.read_text() for path in Path(errors.__file__).parent.glob("*.py"))
    used = set(re.findall(r"\"(config-[a-z-]+)\"", sources))
    assert used == sections
