"""Every value of a model with its origin, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ds_config.issues import shown
from ds_config.origin import DEFAULT, Origin, Provenance
from ds_config.parse import KeyPath, dotted
from ds_config.shape import retired

__all__ = ["explain", "values"]

_WIDEST = 64


def values(model: BaseModel, under: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, bool]]:
    """Yield every leaf of a model as (path, value, whether the value was set), without retired fields."""
    for name, field in type(model).model_fields.items():
        if retired(field) is None:
            yield from _leaves((*under, name), getattr(model, name), name in model.model_fields_set)


def _leaves(path: KeyPath, value: Any, is_set: bool) -> Iterator[tuple[KeyPath, Any, bool]]:
    if isinstance(value, BaseModel):
        yield from ((inner, leaf, is_set and inner_set) for inner, leaf, inner_set in values(value, path))
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item, is_set)
    elif isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item, is_set)
    else:
        yield path, value, is_set


def explain(model: BaseModel, provenance: Provenance | None = None, *, defaults: bool = True) -> str:
    """Print every value of a model and where it came from.

    Args:
        model: Any model; sections are followed.
        provenance: What `validate` filled. Without it the origins are only "given" and "default".
        defaults: Whether to show what was not set.
    Returns:
        One line per value: dotted path, value as in JSON, origin (file:line, "dict", "derived: why", "default").
    """
    rows = []
    for path, value, is_set in values(model):
        origin = provenance.of(path) if provenance is not None else Origin("given") if is_set else DEFAULT
        if defaults or origin.source != "default":
            rows.append((dotted(path), shown(value), str(origin)))
    names = min(_WIDEST, max((len(row[0]) for row in rows), default=0))
    texts = min(_WIDEST, max((len(row[1]) for row in rows), default=0))
    return "\n".join(f"{name:<{names}}  {text:<{texts}}  {origin}" for name, text, origin in rows)
