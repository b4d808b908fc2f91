"""Questions about the annotations of pydantic models, answered without a value being validated.

Words: the *options* of an annotation are its union members with `Annotated` and aliases taken off; the *keys* of a model
are the paths that a document may use, nested models included.
"""

from __future__ import annotations

import enum
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from ds_config.issues import shown
from ds_config.parse import KeyPath
from ds_config.schema_fields import Alias, Deprecated, NoEffect, Retired, Unsupported

__all__ = [
    "Key",
    "Option",
    "accepts_auto",
    "aliases",
    "coerce",
    "describe",
    "inner",
    "is_secret",
    "keys",
    "known_names",
    "literals",
    "model_for",
    "options",
    "refuses_bool",
    "retired",
]

Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Option:
    """One union member: its bare type and the constraints that stand on it."""

    type: Any
    metadata: tuple[Any, ...] = ()


def options(annotation: Any, metadata: Iterable[Any] = ()) -> list[Option]:
    """Flatten unions, `Annotated` and type aliases: `Annotated[int, Ge(0)] | None` is int with Ge(0), and NoneType."""
    aliased = getattr(annotation, "__value__", None)  # a `type X = ...` statement (Python 3.12)
    if aliased is not None and type(annotation).__name__ == "TypeAliasType":
        return options(aliased, metadata)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return options(args[0], (*metadata, *args[1:]))
    if origin in (Union, types.UnionType):
        return [option for arg in args for option in options(arg, metadata)]
    return [Option(annotation, tuple(metadata))]


def of_field(field: FieldInfo) -> list[Option]:
    """Return the options of a field, including the constraints that pydantic moved out of its annotation."""
    return options(field.annotation, field.metadata)


def literals(choices: Sequence[Option]) -> list[Any]:
    """Return all values that the `Literal` and enum options name."""
    values: list[Any] = []
    for option in choices:
        if get_origin(option.type) is Literal:
            values += get_args(option.type)
        elif _is(option.type, enum.Enum):
            values += [member.value for member in option.type]
    return values


def accepts_auto(choices: Sequence[Option]) -> bool:
    """Whether "auto" is a value of its own here, not a request to fill the value in."""
    return "auto" in literals(choices)


def refuses_bool(choices: Sequence[Option]) -> bool:
    """Whether true and false would only pass here by being equal to the literals 1 and 0."""
    numbers = any(type(value) is int for value in literals(choices))
    return numbers and not any(option.type in (bool, Any, object) for option in choices) and True not in _bools(choices)


def _bools(choices: Sequence[Option]) -> set[str | bool]:
    return {True for value in literals(choices) if isinstance(value, bool)}


def _is(candidate: Any, parent: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, parent)


def model_for(choices: Sequence[Option], value: Mapping[str, Any]) -> Model | None:
    """Choose the model among the options that fits `value` best: by its literals, then by most known keys."""
    models = [option.type for option in choices if _is(option.type, BaseModel)]

    def fit(model: Model) -> tuple[bool, int]:
        tags = {name: literals(of_field(field)) for name, field in model.model_fields.items()}
        clash = any(
            choice and name in value and not _names_one_of(value[name], choice) for name, choice in tags.items()
        )
        return not clash, len(known_names(model) & value.keys())

    return max(models, key=fit, default=None)


def _names_one_of(value: Any, choice: Sequence[Any]) -> bool:
    """Whether a value is one of these literals, in any case where it is a text: validators may take `LAMB` for `Lamb`."""
    if isinstance(value, str):
        return value.casefold() in {literal.casefold() for literal in choice if isinstance(literal, str)}
    return value in choice


def inner(choices: Sequence[Option], part: str | int) -> list[Option]:
    """Return the options of an element: of a mapping for a string `part`, of a sequence for an integer."""
    result: list[Option] = []
    for option in choices:
        origin, args = get_origin(option.type) or option.type, get_args(option.type)
        if isinstance(part, str) and _is(origin, Mapping):
            result += options(args[1]) if len(args) == 2 else [Option(Any)]
        elif isinstance(part, int) and origin is tuple and args and args[-1] is not Ellipsis:
            result += options(args[part]) if part < len(args) else []
        elif isinstance(part, int) and (_is(origin, Sequence) or _is(origin, AbstractSet)) and origin is not str:
            result += options(args[0]) if args else [Option(Any)]
        elif option.type in (Any, object):
            result.append(Option(Any))
    return result


def coerce(choices: Sequence[Option], value: Any) -> Any:
    """Turn what JSON can write into what the annotation wants, when nothing is lost or guessed.

    An integral float (below 2**63) becomes an int where an int is wanted and a float is not; a list becomes the tuple or set,
    a string the path or the enum member that is wanted; elements likewise. Everything else is returned as it is, and so are
    objects that a model is wanted for: the model coerces them.
    """
    kinds = [get_origin(option.type) or option.type for option in choices]
    numbers = [type(literal) for literal in literals(choices)]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        wants_int = int in kinds or int in numbers
        return int(value) if wants_int and float not in kinds and float not in numbers else value
    if type(value) is dict and model_for(choices, value) is None:
        return {key: coerce(inner(choices, str(key)), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        value = type(value)(coerce(inner(choices, index), item) for index, item in enumerate(value))
        wanted = next((kind for kind in kinds if kind in (tuple, set, frozenset)), None)
        return wanted(value) if wanted and type(value) is list and list not in kinds else value
    if isinstance(value, str) and str not in kinds:
        for kind in kinds:
            if _is(kind, enum.Enum) and value in [member.value for member in kind]:
                return kind(value)
            if _is(kind, pathlib.PurePath):
                return kind(value)
    return value


_KINDS = {
    SecretStr: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    Any: "anything",
}


def describe(choices: Sequence[Option]) -> str:
    """Describe in plain text which values the options accept: `an integer >= 0, "auto" or null`."""
    parts: list[str] = []
    for option in choices:
        kind = get_origin(option.type) or option.type
        if kind is Literal or _is(kind, enum.Enum):
            parts += [shown(value) for value in literals([option])]
        elif kind in _KINDS:
            parts.append(_KINDS[kind] + _limits(option.metadata))
        elif _is(kind, BaseModel) or _is(kind, Mapping):
            parts.append("an object")
        elif _is(kind, Sequence) or _is(kind, AbstractSet):
            args = get_args(option.type)
            if kind is tuple and args and args[-1] is not Ellipsis:
                parts.append(f"a list of {len(args)} ({', '.join(describe(options(arg)) for arg in args)})")
                continue
            elements = inner([option], 0)
            parts.append("a list" + (f" of ({describe(elements)})" if elements else "") + _limits(option.metadata))
        elif _is(kind, pathlib.PurePath):
            parts.append("a path")
        else:
            parts.append(getattr(kind, "__name__", str(kind)))
    unique = sorted(dict.fromkeys(parts), key="null".__eq__)
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}" if unique else "nothing"


def is_secret(choices: Sequence[Option]) -> bool:
    """Whether the value is one that is never written or shown."""
    return any(option.type is SecretStr for option in choices)


_LIMITS = {
    "ge": ">= {}",
    "gt": "> {}",
    "le": "<= {}",
    "lt": "< {}",
    "multiple_of": "that is a multiple of {}",
    "min_length": "of length >= {}",
    "max_length": "of length <= {}",
}


def _limits(metadata: Iterable[Any]) -> str:
    words = []
    for item in metadata:
        constraints = item.metadata if isinstance(item, FieldInfo) else [item]
        for constraint in constraints:
            bounds = {name: getattr(constraint, name, None) for name in _LIMITS}
            words += [_LIMITS[name].format(bound) for name, bound in bounds.items() if bound is not None]
    return " " + " and ".join(words) if words else ""


def aliases(field: FieldInfo) -> list[str]:
    """Return the alternative spellings of a field."""
    return [item.name for item in field.metadata if isinstance(item, Alias)]


def retired(field: FieldInfo) -> Retired | None:
    """Return why the field is retired, or None for a field that is in use."""
    return next((item for item in field.metadata if isinstance(item, Deprecated | NoEffect | Unsupported)), None)


def known_names(model: Model) -> set[str]:
    """Return every key that a document may use at the level of `model`: fields, aliases, retired fields."""
    return set(model.model_fields) | {name for field in model.model_fields.values() for name in aliases(field)}


@dataclass(frozen=True, slots=True)
class Key:
    """One key that a document may use.

    Attributes:
        path: Where it stands. "*" stands for any key of a mapping, 0 for any index of a list.
        model: The model it belongs to.
        field: The field it sets (another name than the last part of the path for an alias).
    """

    path: KeyPath
    model: Model
    field: str


@lru_cache(maxsize=16)  # every unknown key of a document asks again
def keys(model: Model) -> tuple[Key, ...]:
    """Return every key of `model` and of its nested models, in the order of their definition."""
    return tuple(_keys(model, (), ()))


def _keys(model: Model, under: KeyPath, inside: tuple[Model, ...]) -> Iterator[Key]:
    if model in inside:
        return
    for name, field in model.model_fields.items():
        for spelling in (name, *aliases(field)):
            yield Key((*under, spelling), model, name)
        for part, nested in _nested(of_field(field)):
            yield from _keys(nested, (*under, name, *part), (*inside, model))


def _nested(choices: Sequence[Option], depth: int = 0) -> Iterator[tuple[KeyPath, Model]]:
    for option in choices:
        if _is(option.type, BaseModel):
            yield (), option.type
        elif depth < 4 and option.type not in (Any, object):
            for part in ("*", 0):
                yield from (((part, *rest), model) for rest, model in _nested(inner([option], part), depth + 1))
