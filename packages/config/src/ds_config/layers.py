"""Configurations in layers: files that include others, the environment, the command line. Later layers win, key by key.

    document = layered("run.json", environ=os.environ, overrides=["zero_optimization.stage=2"])
    config = load(Config, document)

A file names those below it in `include`, a path or a list of them, relative to itself. `PREFIX__zero_optimization__stage=2` in the environment and
`zero_optimization.stage=2` on the command line set one key; values are JSON, and what is no JSON is a string.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_config.config_file import Document, Source, read
from ds_config.errors import ConfigError
from ds_config.origin import Origin
from ds_config.parse import KeyPath

__all__ = ["LayeredDocument", "layered"]

_INCLUDE = "include"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class LayeredDocument(Document):
    """A merged document that knows which layer set each value.

    Attributes:
        layers: Documents, the lowest first.
        overrides: Of keys set by the environment or the command line, by what.
    """

    layers: tuple[Document, ...] = ()
    overrides: Mapping[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> Origin:
        """Return where the value at `path` stands: the override, or the place in the highest layer that has it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.overrides:
                return Origin(self.overrides[path[:end]])
        for layer in reversed(self.layers):
            value: Any = layer.data
            for key in path:
                value = value.get(key, _ABSENT) if isinstance(value, Mapping) else value
            if value is not _ABSENT:
                return layer.origin(path)
        return Origin(self.name)


def layered(
    source: Source | Document,
    *,
    environ: Mapping[str, str] | None = None,
    prefix: str = "DS_CONFIG",
    overrides: Sequence[str] = (),
) -> Document:
    """Read a configuration, the files that it includes, and what environment and command line set on top.

    Args:
        source: As `read` takes it. Only files include others.
        environ: Variables `PREFIX__key__key`; None reads none.
        overrides: `key.key=value`, as a command line has them.
    Returns: one document. Objects are merged by key, lists and values are replaced. Its name lists the layers.

    Raises:
        ConfigError: a file is missing or includes itself, an override has no `=`, or sets a key inside a value that is no
            object ("config-layer"); what `read` raises.
    """
    layers = _with_includes(source, ())
    data: dict[str, Any] = {}
    for layer in layers:
        data = _merge(data, {key: value for key, value in layer.data.items() if key != _INCLUDE or not _is_file(layer)})
    names = [layer.name for layer in layers]
    start = f"{prefix}__"
    chosen = sorted((key, value) for key, value in (environ or {}).items() if key.startswith(start))
    set_by: dict[KeyPath, str] = {}
    for key, value in chosen:
        path = tuple(key.removeprefix(start).split("__"))
        _set(data, path, value, f"${key}")
        set_by[path] = f"${key}"
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name:
            raise _refuse(f"override {override!r}", "Write key.key=value.")
        path = tuple(name.removeprefix("--").split("."))
        _set(data, path, value, override)
        set_by[path] = override
    names += (["environment"] if chosen else []) + (["command line"] if overrides else [])
    return LayeredDocument(data, " + ".join(names), layers=tuple(layers), overrides=set_by)


def _is_file(document: Document) -> bool:
    return os.path.isfile(document.name)


def _with_includes(source: Source | Document, above: tuple[str, ...]) -> list[Document]:
    """Read a document and, below it, those that it includes; the lowest first."""
    document = read(source)
    if not _is_file(document):
        return [document]
    here = os.path.realpath(document.name)
    if here in above:
        raise _refuse(f"{document.name} includes itself, by {' -> '.join((*above, here))}", "Take one include out.")
    named = document.data.get(_INCLUDE, [])
    files = [named] if isinstance(named, str) else named
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise _refuse(f"{document.name}: include is {named!r}", "Give a path, or a list of paths.")
    below = [layer for file in files for layer in _with_includes(Path(here).parent / file, (*above, here))]
    return [*below, document]


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(merged[key], value) if both else _merge({}, value) if isinstance(value, Mapping) else value
    return merged


def _set(data: dict[str, Any], path: Sequence[str], text: str, who: str) -> None:
    """Set one key of the merged object, and make the objects around it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if not all(path):
        raise _refuse(f"{who} has an empty key", "Name every key of the path.")
    inside = data
    for key in path[:-1]:
        inside = inside.setdefault(key, {})
        if not isinstance(inside, dict):
            raise _refuse(f"{who} sets a key inside {key!r}, which is {inside!r}", "Override that key as a whole.")
    inside[path[-1]] = value


def _refuse(what: str, fix: str) -> ConfigError:
    return ConfigError(what, code="config-layer", fix=fix)
