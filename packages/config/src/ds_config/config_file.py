"""From what the user gave (a dict, a path, HJSON or JSON text, base64) to one `Document`: values and where they stand.

No model is involved, and pydantic is not imported.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_config.did_you_mean import nearest
from ds_config.errors import ConfigError
from ds_config.issues import Issue, error_of
from ds_config.origin import Origin
from ds_config.parse import MAX_DEPTH, KeyPath, Parsed, dotted, parse
from ds_config.regular_file import read_regular_text

__all__ = ["Document", "Source", "read", "read_all"]

_MOST_VALUES = 2**17  # of one depth of a dict
_MOST_BYTES = 2**22  # a second to read; no configuration comes near
Source = Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration as it was given.

    Attributes:
        data: The outermost object. Not to be changed.
        name: What to call it in messages: the file's path, "dict", "text" or "base64".
        lines: Line of each key and list element, from 1; empty for a dict.
        issues: What reading found wrong (duplicate keys); `read` raises for them, `ds_config.load` reports them with the rest.
    """

    data: Mapping[str, Any]
    name: str = "dict"
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()

    def origin(self, path: KeyPath) -> Origin:
        """Return where the value at `path` stands: its own line, or that of the nearest value around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return Origin(self.name, self.lines[path[:end]])
        return Origin(self.name)


def read(source: Source | Document) -> Document:
    """Read a configuration.

    Args:
        source: A mapping; the path of a JSON or HJSON file; the text itself (it has a `{` or a line end); or the text in
            url-safe base64, as launchers pass it on command lines. A `Document` is returned as it is.
    Raises:
        ConfigError: no such file ("config-source"), not HJSON or not an object ("config-syntax"), a key given twice in one
            object ("config-duplicate-key"; names both lines, all such keys together).
    """
    document = read_all(source)
    if document.issues:
        raise error_of(document.issues, document.name)
    return document


def read_all(source: Source | Document) -> Document:
    """Read a document as `read` does, but leave duplicate keys in `Document.issues`.

    For a caller that reports everything at once.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        _check_depth(source)
        return Document(source, "dict", {}, _foreign_keys(source))
    if isinstance(source, str):
        if len(source) > _MOST_BYTES:
            raise _too_large("a text", len(source))
        if source.lstrip().startswith("{") or "\n" in source:
            return _document(source, "text")
        decoded = None if os.path.exists(source) else _from_base64(source)
        if decoded is not None:
            return _document(decoded, "base64")
    elif not isinstance(source, os.PathLike):
        raise ConfigError(
            f"a configuration of type {type(source).__name__}",
            code="config-source",
            fix="Give a dict, the path of a JSON or HJSON file, its text, or its text in url-safe base64.",
        )
    return _document(_file_text(Path(source)), os.fspath(source))


def _too_large(what: str, nbytes: int) -> ConfigError:
    return ConfigError(
        f"{what} of {nbytes} bytes is no configuration; the largest may have {_MOST_BYTES}",
        code="config-source",
        fix="Give the configuration itself; data belongs in files of its own.",
    )


def _check_depth(source: Mapping[Any, Any]) -> None:
    """Raise ConfigError for a dict with more objects inside each other than a file may have, or with itself inside."""
    level: list[Any] = [source]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        inside = [list(value.values()) if isinstance(value, Mapping) else value for value in level]
        level = [item for values in inside for item in values if isinstance(item, Mapping | list | tuple)]
        if len(level) > _MOST_VALUES:
            break
    if level:
        raise ConfigError(
            f"the configuration has more than {MAX_DEPTH} objects and lists inside each other, or one inside itself",
            code="config-syntax",
            fix="Give a dict as a JSON file would have it.",
        )


def _document(text: str, name: str) -> Document:
    parsed = parse(text, name)
    if not isinstance(parsed.data, dict):
        raise ConfigError(
            f"{name}: a configuration is an object, found a list", code="config-syntax", fix="Write { ... }."
        )
    return Document(parsed.data, name, parsed.lines, _duplicates(parsed, name))


def _duplicates(parsed: Parsed, name: str) -> tuple[Issue, ...]:
    return tuple(
        Issue(
            "config-duplicate-key",
            twice.path,
            Origin(name, twice.line),
            f"given twice in one object: first at line {twice.first_line}, again at line {twice.line}.",
            f"Keep one {dotted(twice.path[-1:])!r}.",
        )
        for twice in parsed.duplicates
    )


def _foreign_keys(value: object, path: KeyPath = ()) -> tuple[Issue, ...]:
    """Collect an issue for each key of a dict that no JSON object can have (`{1: ...}`)."""
    issues: list[Issue] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                issues += _foreign_keys(inner, (*path, key))
            else:
                message = f"has the key {key!r} of type {type(key).__name__}; keys are strings."
                issues.append(Issue("config-value", path, Origin("dict"), message))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            issues += _foreign_keys(inner, (*path, index))
    return tuple(issues)


def _from_base64(text: str) -> str | None:
    """Decode the JSON object that `text` encodes; return None when there is none (then `text` is a path)."""
    stripped = text.strip()
    try:
        decoded = base64.b64decode(stripped + "=" * (-len(stripped) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip("\ufeff \t\r\n").startswith("{") else None


def _file_text(path: Path) -> str:
    try:
        return read_regular_text(path, _MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}", code="config-source", fix=_like(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", code="config-source", fix="Save it as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{str(path)[:300]} cannot be read: {why}", code="config-source", fix="Give a readable file."
        ) from None


def _like(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"The folder {path.parent} cannot be listed either (working directory: {_here()})."
    close = nearest(path.name, names)
    return f"Did you mean {path.parent / close[0]}?" if close else f"Check the path (working directory: {_here()})."


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "removed"
