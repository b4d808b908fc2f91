"""A document against a model: every problem at once, each with its place, or the model.

Three passes. *prepare* walks document and model side by side and settles what needs names: renamed and retired keys,
`auto`, unknown keys, numbers that JSON wrote as floats. *pydantic* then checks the values. *collect* turns both passes'
findings into one error. Origins are recorded on the way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ds_config.config_file import Document, Source, read_all
from ds_config.did_you_mean import distance, nearest
from ds_config.errors import ConfigError
from ds_config.issues import Issue, error_of, shown
from ds_config.migrate import migrate
from ds_config.origin import Origin, Provenance
from ds_config.parse import KeyPath, dotted
from ds_config.schema_fields import retirement_note
from ds_config.shape import (
    Model,
    Option,
    accepts_auto,
    coerce,
    describe,
    inner,
    is_secret,
    keys,
    known_names,
    literals,
    model_for,
    of_field,
    refuses_bool,
    retired,
)
from ds_config.strict_model import PREPARED, StrictModel

__all__ = ["USE_DEFAULT", "Auto", "examine", "load", "validate"]

_EXPLAINED = 50  # unknown keys whose meaning is guessed; more of them are another kind of file
_PLACES = 8  # a name that more sections have says nothing about where it belongs
_LONGEST_NAME = 200
_MOST_BITS = 128
_Detail = Mapping[str, Any]  # one entry of pydantic's ValidationError.errors()
_log = logging.getLogger("ds_config")
_M = TypeVar("_M", bound=StrictModel)


class _UseDefault:
    def __repr__(self) -> str:
        return "USE_DEFAULT"


USE_DEFAULT = _UseDefault()
"""As a value of `auto`: the key is as if it had not been given."""

Auto = Mapping[str, object]
"""What "auto" stands for, by dotted path; `USE_DEFAULT` for the field's default."""


@dataclass(slots=True)
class _Pass:
    """What the passes over one document share."""

    root: Model
    auto: Auto
    provenance: Provenance
    issues: list[Issue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: int = 0  # keys that the model does not know, so far
    dropped: set[KeyPath] = field(default_factory=set)  # taken out by prepare: their absence is no second problem

    def problem(self, code: str, path: KeyPath, message: str, fix: str = "", suggestions: Sequence[str] = ()) -> None:
        self.issues.append(Issue(code, path, self.provenance.of(path), message, fix, tuple(suggestions)))


def load(
    model: type[_M], source: Source | Document, *, auto: Auto | None = None, provenance: Provenance | None = None
) -> _M:
    """Read `source` (see `ds_config.read`) and validate it; problems of both are one error. See `validate`."""
    return validate(model, read_all(source), auto=auto, provenance=provenance)


def validate(
    model: type[_M],
    document: Document | Mapping[str, Any],
    *,
    auto: Auto | None = None,
    provenance: Provenance | None = None,
) -> _M:
    """Check a document against a model.

    Args:
        model: The `StrictModel` of the outermost object.
        document: What `read` returned, or a plain mapping.
        auto: What the value "auto" stands for, by dotted path. Fields that name "auto" among their literals keep it.
        provenance: Filled with the origin of every value, for `explain` and for those who derive more values.
    Raises:
        ConfigError: anything is wrong; lists every problem with path, place, what was found, what is expected, and the
            nearest known name ("config-invalid", or the one code that all problems share: "config-unknown-key",
            "config-value", "config-both-keys", "config-auto", "config-duplicate-key").
        UnsupportedConfigError: nothing is wrong but that it asks for what is not built ("config-unbuilt").
        Where the model says which command explains its keys (`KEYS_COMMAND`), the error ends with it and those it is about.
    Logs: one warning on the logger "ds_config" per deprecated or dead key.
    """
    record = Provenance() if provenance is None else provenance
    result, wrong = _examine(model, read_all(document), auto, record, keep=False)
    if result is None or wrong is not None:
        raise wrong or error_of((), "")
    _record_defaults(result, (), record)
    return result


def examine(
    model: type[_M], source: Source | Document, *, auto: Auto | None = None
) -> tuple[_M | None, ConfigError | None]:
    """Return the valid part of a document, and the error of `validate` about the rest.

    For a caller that checks more of the valid part. A wrong value or an unknown key counts as left out; None where
    nothing valid is left.
    """
    return _examine(model, read_all(source), auto, Provenance(), keep=True)


def _examine(
    model: type[_M], document: Document, auto: Auto | None, record: Provenance, *, keep: bool
) -> tuple[_M | None, ConfigError | None]:
    record.fill({path: document.origin(path) for path in _paths(document.data)})
    work = _Pass(model, auto or {}, record, list(document.issues))
    prepared = _prepare(work, model, document.data, ())
    result: _M | None = None
    try:
        result = model.model_validate(prepared, context=PREPARED)
    except ValidationError as error:
        _collect(work, model, prepared, error)
        if keep:
            result = _rest(model, prepared, error)
    for note in work.notes:
        _log.warning("%s", note)
    if result is not None and not work.issues:
        return result, None
    return result, error_of(work.issues, document.name, anchors(model, work.issues))


def _rest(model: type[_M], prepared: dict[str, Any], error: ValidationError) -> _M | None:
    """Build the model from the valid values: first without the wrong values, then without their sections."""
    for depth in (None, 1):
        for detail in error.errors(include_url=False):
            if (located := _locate(model, prepared, detail["loc"])) is not None:
                _leave_out(prepared, located[0][:depth])
        try:
            return model.model_validate(prepared, context=PREPARED)
        except ValidationError as left:
            error = left
    return None


def _leave_out(prepared: dict[str, Any], path: KeyPath) -> None:
    section: Any = prepared
    for part in path[:-1]:
        section = section[part] if _has(section, part) else None
    if path and isinstance(section, dict):
        section.pop(path[-1], None)


def anchors(model: Model, issues: Sequence[Issue]) -> list[str]:
    """List the words of the command that explains the keys of the issues; none where the model names no command.

    A key is the suggested one, else the innermost documented key on the path of the issue.
    """
    command: str = getattr(model, "KEYS_COMMAND", "")
    if not command:
        return []
    known = {".".join(map(str, key.path)) for key in keys(model)}
    named: dict[str, None] = {}
    for issue in issues[:_EXPLAINED]:
        meant = issue.suggestions if issue.code == "config-unknown-key" else ()
        candidates: list[Sequence[str | int]] = [near.split(".") for near in meant]
        candidates += [issue.path[:end] for end in range(len(issue.path), 0, -1)]
        at = next((name for path in candidates for name in _names(path) if name in known), None)
        if at is not None:
            named[at] = None
    return [command, *named] if named else []


def _names(path: Sequence[str | int]) -> Iterator[str]:
    """Yield the path as `keys` writes paths, then with each later part as `*`, the key of a mapping."""
    parts = ["0" if isinstance(part, int) else str(part) for part in path]
    yield ".".join(parts)
    for i in range(1, len(parts)):
        yield ".".join([*parts[:i], "*", *parts[i + 1 :]])


def _paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    if isinstance(value, Mapping):
        return [p for key, item in value.items() for p in [(*path, key), *_paths(item, (*path, key))]]
    if isinstance(value, list | tuple):
        return [p for i, item in enumerate(value) for p in [(*path, i), *_paths(item, (*path, i))]]
    return []


# --- prepare


def _prepare(work: _Pass, model: Model, section: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    """Rewrite the object at `path` to today's keys, resolve and coerce known values, and drop unknown keys."""
    level = migrate(model, {key: value for key, value in section.items() if isinstance(key, str)})
    for name, reason in level.notes:
        place = work.provenance.of((*path, name))
        work.notes.append(f"{place} {dotted((*path, name))} {retirement_note(reason, dotted(path))}")
    for problem in level.problems:
        work.dropped.add((*path, problem.name))
        work.problem(problem.code, (*path, problem.name), problem.message, problem.fix)
    for move in level.moves:
        why = f"written as {move.old!r}"
        work.provenance.move((*path, move.old), (*path, *move.new), why, keep_inner=move.whole)
    ready: dict[str, Any] = {}
    for key, value in level.values.items():
        here = (*path, key)
        if key in model.model_fields:
            ready[key] = _value(work, of_field(model.model_fields[key]), value, here)
        elif model.model_config.get("extra") == "forbid":
            ready[key] = _DROPPED
            _unknown(work, model, here)
        else:
            ready[key] = _value(work, [Option(Any)], value, here)
        if ready[key] is _DROPPED:
            del ready[key]
            work.dropped.add(here)
    return ready


_DROPPED = object()


def _value(work: _Pass, choices: Sequence[Option], value: Any, path: KeyPath) -> Any:
    """Prepare a value for pydantic; return `_DROPPED` for a problem or a value that stands for the default."""
    if isinstance(value, Mapping):
        model = model_for(choices, value)
        if model is not None:
            return _prepare(work, model, value, path)
        items = {key: _value(work, inner(choices, str(key)), item, (*path, key)) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _DROPPED}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        elements = [_value(work, inner(choices, i), item, (*path, i)) for i, item in enumerate(value)]
        # A dropped element must not move the others: the document is refused anyway, only places count.
        sequence = type(value)(None if item is _DROPPED else item for item in elements)
        return coerce(choices, sequence)
    if isinstance(value, str) and value == "auto" and not accepts_auto(choices):
        return _resolved(work, choices, path)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        expected = "a smaller number" if (text := describe(choices)) == "anything" else text
        work.problem("config-value", path, f"found {_seen(choices, value)}, expected {expected}.")
        return _DROPPED
    if isinstance(value, bool) and refuses_bool(choices):
        work.problem("config-value", path, f"found {_seen(choices, value)}, expected {describe(choices)}.")
        return _DROPPED
    return coerce(choices, value)


def _resolved(work: _Pass, choices: Sequence[Option], path: KeyPath) -> Any:
    name = dotted(path)
    if name not in work.auto:
        work.problem("config-auto", path, 'is "auto", and no value was supplied for it.', _asked(choices))
        return _DROPPED
    value = work.auto[name]
    place = work.provenance.of(path)
    if value is USE_DEFAULT:
        work.provenance.record(path, Origin("default", why=f'"auto" at {place}'))
        return _DROPPED
    work.provenance.derived(path, f'"auto" at {place}')
    return coerce(choices, value)


def _asked(choices: Sequence[Option]) -> str:
    expected = describe(choices)
    return "Write the value." if expected == "anything" else f"Write {expected}."


def _unknown(work: _Pass, model: Model, path: KeyPath) -> None:
    """Report a key that the model does not know, with the names that were probably meant."""
    name, section = str(path[-1]), path[:-1]
    work.unknown += 1
    if work.unknown > _EXPLAINED or len(name) > _LONGEST_NAME:
        # Somebody gave another kind of file: what each of its keys may have meant helps nobody, and takes long.
        work.problem("config-unknown-key", (*section, name[:_LONGEST_NAME]), "is unknown.")
        return
    here = nearest(name, known_names(model))
    places = list(dict.fromkeys(dotted(key.path) for key in keys(work.root) if key.path[-1] == name))
    listed = sorted(n for n, f in model.model_fields.items() if not retired(f))
    known = f"Known here: {', '.join(listed)}." if len(listed) <= 12 else ""
    if dotted(path) in places:  # of another type of optimizer or schedule
        what = f"is a key of other types of {path[0]}, not of this one."
        work.problem("config-unknown-key", path, what, known, [])
    elif 0 < len(places) <= _PLACES and not (here and distance(name, here[0]) <= 1):
        more = f" (and {len(places) - 3} more)" if len(places) > 3 else ""
        work.problem(
            "config-unknown-key", path, f"is unknown here; it belongs in {' or '.join(places[:3])}{more}.", "", places
        )
    elif here:
        guess = dotted((*section, here[0]))
        work.problem("config-unknown-key", path, f"is unknown; did you mean {here[0]!r}?", "", [guess])
    else:
        names = nearest(name, {str(key.path[-1]) for key in keys(work.root)})
        close = list(dict.fromkeys(dotted(key.path) for key in keys(work.root) if key.path[-1] in names))
        if len(close) > _PLACES:
            close = []
        message = f"is unknown; did you mean {' or '.join(close[:3])}?" if close else "is unknown."
        work.problem(
            "config-unknown-key", path, message, "" if close else known or "Nothing has a similar name.", close[:3]
        )


# --- collect


def _collect(work: _Pass, model: Model, data: Mapping[str, Any], error: ValidationError) -> None:
    """Turn pydantic's errors into one issue per path."""
    by_path: dict[KeyPath, list[tuple[_Detail, list[Option], Any]]] = {}
    for detail in error.errors(include_url=False):
        if (located := _locate(model, data, detail["loc"])) is None:
            continue
        path, choices, value = located
        by_path.setdefault(path, []).append((detail, choices, value))
    for path, entries in by_path.items():
        if path in work.dropped:
            continue
        value = entries[0][2]
        if isinstance(value, Mapping | list | tuple) and any(
            len(p) > len(path) and p[: len(path)] == path for p in by_path
        ):
            entries = [
                entry for entry in entries if _spoken(entry[0])
            ]  # another member of the union, not the one meant
        for message in dict.fromkeys(_message(*entry) for entry in entries):
            close = _close_values(entries[0][1], value)
            fix = f"Did you mean {close[0]}?" if close else _unquoted(entries[0][1], value)
            work.problem("config-value", path, message, fix, close)


def _spoken(detail: _Detail) -> bool:
    """Whether a validator of ours said it in its own words."""
    return detail["type"] in ("value_error", "assertion_error") or "." in detail["type"]


def _locate(
    model: Model, data: Mapping[str, Any], loc: tuple[int | str, ...]
) -> tuple[KeyPath, list[Option], Any] | None:
    """Follow a pydantic location through the data: (path, what is expected there, what stands there).

    Parts that are no key or index of the data are union tags, and are passed over; None when the tag is that of a model of
    the union that the value was not meant for.
    """
    path: KeyPath = ()
    value: Any = data
    choices = [Option(model)]
    for part in loc:
        owner = model_for(choices, value) if isinstance(value, Mapping) else None
        if owner is not None and part in owner.model_fields:
            choices = of_field(owner.model_fields[str(part)])
            value = value.get(part)
        elif _has(value, part):
            choices, value = inner(choices, part), value[part]
        elif owner is not None and part in _other_models(choices, owner):
            return None
        else:
            continue
        path = (*path, part)
    return path, choices, value


def _other_models(choices: Sequence[Option], meant: Model) -> set[str]:
    return {
        option.type.__name__ for option in choices if option.type is not meant and hasattr(option.type, "model_fields")
    }


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


_PLAIN = (
    "missing",
    "_type",
    "_parsing",
    "_from_float",
    "is_instance_of",
    "greater_than",
    "less_than",
    "literal_error",
    "enum",
    "multiple_of",
    "too_",
)


def _message(detail: _Detail, choices: list[Option], value: Any) -> str:
    expected = describe(choices)
    if detail["type"] == "missing" and value is None:
        return f"is missing; expected {expected}."
    if _spoken(detail):
        text = str(detail.get("ctx", {}).get("error", detail["msg"])).strip()
        return text if text.endswith((".", "?", "!")) else f"{text}."
    if expected == "anything":
        return f"found {_seen(choices, value)}: {detail['msg']}."
    extra = "" if any(sign in detail["type"] for sign in _PLAIN) else f" ({detail['msg']})"
    return f"found {_seen(choices, value)}, expected {expected}{extra}."


def _seen(choices: Sequence[Option], value: Any) -> str:
    return "a value that is not shown" if is_secret(choices) else shown(value)


def _unquoted(choices: Sequence[Option], value: Any) -> str:
    """Advise to write a number without quotation marks, where a number is expected and a text holds one."""
    if not isinstance(value, str) or not any(option.type in (int, float) for option in choices):
        return ""
    try:
        finite = len(value) <= _LONGEST_NAME and math.isfinite(float(value))
    except ValueError:
        return ""
    return f"Write {value.strip()} without quotation marks." if finite else ""


def _close_values(choices: Sequence[Option], value: Any) -> list[str]:
    if not isinstance(value, str):
        return []
    texts = {text for text in literals(choices) if isinstance(text, str)}
    return [shown(text) for text in nearest(value, texts)] or [
        shown(text) for text in texts if text.casefold() == value.casefold()
    ]


def _record_defaults(model: BaseModel, path: KeyPath, record: Provenance) -> None:
    """Record the origin "default" for every unset value, also inside sections that a file sets."""
    for name in type(model).model_fields:
        here, value = (*path, name), getattr(model, name)
        if name not in model.model_fields_set:
            if here not in record:
                record.record(here, Origin("default"))
        elif isinstance(value, BaseModel):
            _record_defaults(value, here, record)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(item, BaseModel):
                    _record_defaults(item, (*here, key), record)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    _record_defaults(item, (*here, index), record)
