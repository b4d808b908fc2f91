"""Attributes of upstream's that only read another one of ours."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def reads(path: str, meaning: str) -> Any:
    """Build a property that returns the attribute at `path` ("state.step")."""
    return property(attrgetter(path), doc=meaning)
