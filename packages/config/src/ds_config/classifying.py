"""What becomes of each key of a document: used, moved, without effect, off, not built, unknown. For people who bring a file along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_config.config_file import Document, Source, read_all
from ds_config.migrate import migrate
from ds_config.origin import Origin
from ds_config.parse import KeyPath, dotted
from ds_config.schema_fields import Deprecated, NoEffect, Unsupported
from ds_config.shape import Model, Option, aliases, inner, known_names, model_for, of_field, retired

__all__ = ["KeyReport", "Kind", "classify"]

Kind = Literal["used", "moved", "no effect", "off", "not built", "unknown"]


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One key of a document.

    Attributes:
        path: Where it stands.
        kind: What becomes of it. "off": it concerns what is not built, and does not ask for it.
        why: The new place, the reason, or what to use instead; "" where it is used.
        origin: File and line.
    """

    path: KeyPath
    kind: Kind
    why: str
    origin: Origin

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.kind}{f' ({self.why})' if self.why else ''}"


def classify(model: Model, source: Source | Document) -> tuple[KeyReport, ...]:
    """Report every key of `source`, in order, with its effect; keys of a section share the section's effect.

    Values are not checked: `load` checks them. A section that is used is reported by its keys.
    """
    document = read_all(source)
    return tuple(
        KeyReport(path, kind, why, document.origin(path)) for path, kind, why in _walk(model, document.data, ())
    )


def _walk(model: Model, data: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Kind, str]]:
    refused = {problem.name for problem in migrate(model, data).problems}
    for name, value in data.items():
        here = (*path, name)
        if name not in known_names(model):
            yield here, "unknown", ""
            continue
        owner, field = next((n, f) for n, f in model.model_fields.items() if name == n or name in aliases(f))
        reason = retired(field)
        if isinstance(reason, Deprecated):
            yield here, "moved", f"to {dotted((*path, *reason.new.split('.')))}"
        elif isinstance(reason, NoEffect):
            yield from _all(here, value, "no effect", reason.why)
        elif isinstance(reason, Unsupported):
            yield from _all(here, value, "not built" if owner in refused else "off", reason.instead)
        else:
            yield from _value(of_field(field), value, here, "moved" if name != owner else "used")


def _value(choices: Sequence[Option], value: Any, path: KeyPath, kind: Kind) -> Iterator[tuple[KeyPath, Kind, str]]:
    model = model_for(choices, value) if isinstance(value, Mapping) else None
    if model is not None:
        yield from _walk(model, value, path)
    elif isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _value(inner(choices, str(name)), item, (*path, str(name)), kind)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _value(inner(choices, index), item, (*path, index), kind)
    else:
        yield path, kind, "another spelling" if kind == "moved" else ""


def _all(path: KeyPath, value: Any, kind: Kind, why: str) -> Iterator[tuple[KeyPath, Kind, str]]:
    """Yield a section and everything in the section with the same kind and reason."""
    if not isinstance(value, Mapping) or not value:
        yield path, kind, why
        return
    for name, item in value.items():
        yield from _all((*path, str(name)), item, kind, why)
