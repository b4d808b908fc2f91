"""What a row of the table can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ConstantRow", "Missing", "Rows", "from_", "not_", "values"]


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
Rows = Mapping[str, Row]


def from_(home: str, *names: str, **renamed: str) -> dict[str, Row]:
    """Build rows for names of a module, unchanged or renamed."""
    same: dict[str, Row] = {name: f"{home}:{name}" for name in names}
    return same | {name: f"{home}:{there}" for name, there in renamed.items()}


def not_(missing: Missing, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, missing)


def values(constants: Mapping[str, object]) -> dict[str, Row]:
    """Build the rows of constants, by name."""
    return {name: ConstantRow(value) for name, value in constants.items()}
