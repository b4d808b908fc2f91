"""Check option records: frozen dataclasses that people fill in by hand, where a wrong value would act in silence.

A clipping norm of -1 turns every gradient around, a memory mode "AUTO" is none of the three and was taken for the default. A record calls
`check_options(self, clip="> 0")` in its `__post_init__`. Types are strict, as those of a configuration are: "3" is no number, 1 is not True.
"""

from __future__ import annotations

import collections.abc
import functools
import numbers
import operator
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from ds_config.errors import PlanError

__all__ = ["check_options"]

_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def check_options(record: object, **limits: str) -> None:
    """Check the fields of a dataclass against their annotations, and numbers against limits.

    Of collections the kind is checked, and what is in tuples. Annotations name what the record's module has imported. Costs some microseconds.

    Args:
        limits: What a number has to be: `"> 0"`, or `">= 0, <= 1"`. Where the annotation allows None, that passes.
    Raises:
        PlanError: with every field that is wrong ("config-option").
    """
    wrong = []
    cls: Any = type(record)
    for name, hint in _hints_of(cls).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            wrong.append(f"{name} is {value!r}, expected {_words_of(hint)}")
        elif name in limits and value is not None and not _is_within(value, limits[name]):
            wrong.append(f"{name} is {value!r}, expected a number {limits[name]}")
    if wrong:
        raise PlanError(
            f"{type(record).__name__}: " + "; ".join(wrong),
            code="config-option",
            fix="Pass what is expected; `help` of the class says what each field means.",
        )


@functools.cache
def _hints_of(cls: type) -> Mapping[str, Any]:
    names, hints = vars(sys.modules[cls.__module__]), {}
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        hints[name] = eval(field.type, dict(names)) if isinstance(field.type, str) else field.type
    return hints


def _is_within(value: Any, limit: str) -> bool:
    bounds = [bound.split() for bound in limit.split(", ")]
    return all(_SIGNS[sign](value, float(bound)) for sign, bound in bounds)


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple:
        each = parts[0] if parts[1:] == (...,) else Any
        return isinstance(value, (tuple, list)) and all(_fits(item, each) for item in value)
    kind = origin or hint
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if kind is None:
        return value is None
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _words_of(hint: Any) -> str:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words_of(part) for part in parts)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, parts))
    if hint is type(None):
        return "None"
    return {int: "an integer", float: "a number", bool: "True or False", str: "a string"}.get(
        hint, getattr(typing.get_origin(hint) or hint, "__name__", str(hint))
    )
