"""One level of one document against the history of its model: aliases, deprecated, dead and unbuilt keys. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ds_config.issues import shown
from ds_config.schema_fields import Deprecated, NoEffect, Unsupported
from ds_config.shape import Model, aliases, coerce, of_field, retired

__all__ = ["KeyProblem", "Level", "MovedKey", "migrate"]


@dataclass(frozen=True, slots=True)
class MovedKey:
    """The value of key `old` now stands at `new`, seen from the same level; `whole` when it was moved unchanged."""

    old: str
    new: tuple[str, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """What is wrong with the key `name` of this level."""

    code: str
    name: str
    message: str
    fix: str


@dataclass(slots=True)
class Level:
    """What became of one level.

    Attributes:
        values: The object with today's keys only (unknown ones included; they are not judged here).
        moves: What was renamed.
        notes: (key, why it is retired), to be logged once each.
        problems: What cannot be accepted; these keys are not in `values`.
    """

    values: dict[str, Any]
    moves: list[MovedKey] = field(default_factory=list)
    notes: list[tuple[str, Deprecated | NoEffect]] = field(default_factory=list)
    problems: list[KeyProblem] = field(default_factory=list)


def migrate(model: Model, section: Mapping[str, Any]) -> Level:
    """Rewrite the keys of `section` into those that `model` uses today. `section` is not changed."""
    level = Level(dict(section))
    for name, info in model.model_fields.items():
        for old in aliases(info):
            if old in level.values:
                _move(level, MovedKey(old, (name,), whole=True), level.values[old])
        reason = retired(info)
        if reason is None or name not in level.values:
            continue
        value = level.values[name]
        if value == "auto":
            del level.values[name]  # "whatever is right" is, for a retired key, its absence
            continue
        parsed = _parsed(model, name, value)
        if parsed is _WRONG:
            continue  # left where it is: validation will say what is wrong with it
        if isinstance(reason, Deprecated):
            move = MovedKey(name, tuple(reason.new.split(".")), whole=reason.convert is None)
            try:
                value = reason.convert(value) if reason.convert else value
            except ValueError as error:
                del level.values[name]
                level.problems.append(KeyProblem("config-value", name, f"found {shown(value)}: {error}.", ""))
                continue
            if _move(level, move, value):
                level.notes.append((name, reason))
        elif isinstance(reason, NoEffect):
            del level.values[name]
            level.notes.append((name, reason))
        elif isinstance(reason, Unsupported):
            del level.values[name]
            if not _is_off(parsed, info.get_default(call_default_factory=True)):
                message = f"asks for {shown(value)}, which is not built here."
                level.problems.append(KeyProblem("config-unbuilt", name, message, f"Instead: {reason.instead}."))
    return level


def _move(level: Level, move: MovedKey, value: Any) -> bool:
    """Put `value` at the new place; a new place that is taken is a problem."""
    del level.values[move.old]
    new = ".".join(move.new)
    *sections, last = move.new
    target, occupied = level.values, False
    for section in sections:
        existing = target.get(section)
        occupied = occupied or not (existing is None or isinstance(existing, Mapping))
        target[section] = dict(existing) if isinstance(existing, Mapping) else {}
        target = target[section]
    if occupied or last in target:
        message = f"and {new!r} are two names of one setting, and both are given."
        level.problems.append(KeyProblem("config-both-keys", move.old, message, f"Keep {new!r}."))
        return False
    target[last] = value
    level.moves.append(move)
    return True


_WRONG = object()


def _parsed(model: Model, name: str, value: Any) -> Any:
    """Validate the value against its field's type; return `_WRONG` if invalid."""
    try:
        return _adapter(model, name).validate_python(coerce(of_field(model.model_fields[name]), value), strict=True)
    except ValidationError:
        return _WRONG


@functools.cache
def _adapter(model: Model, name: str) -> TypeAdapter[Any]:
    annotation: Any = model.model_fields[name].annotation
    own_rules = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return TypeAdapter(annotation, config=None if own_rules else ConfigDict(arbitrary_types_allowed=True))


def _is_off(value: Any, default: Any) -> bool:
    if value is None or value == default:
        return True
    if isinstance(default, bool):
        return False  # where the default is true, it is false that asks for something
    if isinstance(value, BaseModel):
        if hasattr(value, "enabled"):
            return value.enabled is False
        fields = type(value).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        return all(getattr(value, name) == default for name, default in defaults.items())
    return value is False or (isinstance(value, Mapping) and value.get("enabled") is False)
