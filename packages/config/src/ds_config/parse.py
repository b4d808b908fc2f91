"""A JSON and HJSON parser that remembers where everything stands.

HJSON is JSON for people: comments (`#`, `//`, `/* */`), trailing or missing commas, unquoted keys, unquoted strings that
run to the end of their line, `'''` strings over several lines, optional braces around the whole document. Every JSON
document is an HJSON document with the same value, so one parser serves both.

Words: a *path* is the tuple of keys and indices that leads to a value; its *line* (from 1) is where its key stands, or,
in a list, where the element starts. A *duplicate* is a key given twice in one object: the first value is kept, both lines
are reported.

Deviations from HJSON, all of them refusals of what is never meant in a configuration: the Python and JavaScript words
`True False None NaN Infinity` are not silently strings; numbers beyond float64 and lone surrogates are errors.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ds_config.errors import ConfigError

__all__ = ["MAX_DEPTH", "Duplicate", "KeyPath", "Parsed", "dotted", "parse"]

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 64
_MAX_DIGITS = 38
_SPACE = re.compile(r"(?:[ \t\r\n\f\b]+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_END = r"[ \t\r]*(?=[,\]}\n#]|//|/\*|\Z)"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?" + _END)
_WORD = re.compile(r"(true|false|null|True|False|None|-?NaN|-?Infinity)" + _END)
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"']+[^\s,:\[\]{}]*|(?=:)")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\\\x00-\x1f]*")}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\", "/": "/"}
_HEX4 = re.compile(r"[0-9A-Fa-f]{4}")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_MEANT = {"True": "true", "False": "false", "None": "null"}


def dotted(path: KeyPath) -> str:
    """Write a path the way people say it: `a.b[0].c`; keys that hold dots or spaces are quoted."""
    out = ""
    for part in path:
        if isinstance(part, int):
            out += f"[{part}]"
        else:
            text = part if re.fullmatch(r"[^\s.\[\]\"]+", part) else '"' + part.replace('"', '\\"') + '"'
            out += f".{text}" if out else text
    return out


@dataclass(frozen=True, slots=True)
class Duplicate:
    """One key given twice in the same object."""

    path: KeyPath
    first_line: int
    line: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text says, and where it says it."""

    data: Any
    lines: Mapping[KeyPath, int]
    duplicates: tuple[Duplicate, ...]


def parse(text: str, name: str = "text") -> Parsed:
    """Read one JSON or HJSON document.

    Args:
        text: The document. A byte order mark is skipped.
        name: What to call it in errors, usually the file's path.
    Raises:
        ConfigError: it is not HJSON ("config-syntax"), with line and column.
    Cost: linear in the text; about 3 MB/s.
    """
    reader = _JsonParser(text.removeprefix("\ufeff"), name)
    data = reader.document()
    return Parsed(data, MappingProxyType(reader.lines), tuple(reader.duplicates))


class _JsonParser:
    """One pass over one text. `pos` is the next character; each method consumes what it is named after."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.pos = text, name, 0
        self.newlines = [i for i, char in enumerate(text) if char == "\n"]
        self.lines: dict[KeyPath, int] = {}
        self.duplicates: list[Duplicate] = []
        self.unquoted: list[
            tuple[int, str]
        ] = []  # values that ran to the end of a line: the usual cause of a lost bracket

    # --- places and errors

    def line(self, pos: int) -> int:
        return bisect.bisect_left(self.newlines, pos) + 1

    def error(self, message: str, fix: str = "", *, pos: int | None = None) -> ConfigError:
        where = self.pos if pos is None else pos
        before = bisect.bisect_left(self.newlines, where)
        column = where - (self.newlines[before - 1] if before else -1)
        return ConfigError(f"{self.name}:{before + 1}:{column}: {message}", code="config-syntax", fix=fix)

    def swallowed(self) -> str:
        """Name the last unquoted text that contains a bracket or a comma, where a bracket is missed later."""
        for pos, text in reversed(self.unquoted):
            if re.search(r"[\]},]", text):
                return f"line {self.line(pos)}: the unquoted text {text!r} runs to the end of its line. Quote it, or end the value with a comma."
        return "Close it, or remove what comes too much."

    # --- tokens

    def space(self) -> str:
        """Skip white space and comments; return the next character, or '' at the end."""
        match = _SPACE.match(self.text, self.pos)
        self.pos = match.end() if match else self.pos
        if self.text.startswith("/*", self.pos):
            raise self.error("this comment is never closed", "Write */ where it ends.")
        return self.text[self.pos : self.pos + 1]

    def key(self) -> str:
        if self.text[self.pos] in "\"'":
            return self.quoted(self.text[self.pos])
        match = _BARE_KEY.match(self.text, self.pos)
        if not match or not match.group():
            char = self.text[self.pos]
            raise self.error(f"expected a key, found {char!r}", self.swallowed())
        self.pos = match.end()
        return match.group()

    def quoted(self, quote: str) -> str:
        start, parts = self.pos, list[str]()
        self.pos += 1
        while True:
            match = _PLAIN[quote].match(self.text, self.pos)
            if match:
                parts.append(match.group())
                self.pos = match.end()
            char = self.text[self.pos : self.pos + 1]
            if char == quote:
                self.pos += 1
                return "".join(parts)
            if char != "\\":
                what = "the text ends" if not char else "the line ends" if char in "\r\n" else f"{char!r} stands"
                raise self.error(f"{what} inside a quoted string", f"Close it with {quote}.", pos=start)
            parts.append(self.escape())

    def escape(self) -> str:
        char = self.text[self.pos + 1 : self.pos + 2]
        if char in _ESCAPES and char:
            self.pos += 2
            return _ESCAPES[char]
        if char != "u":
            raise self.error(f"\\{char} is no escape", "Write \\\\ for a backslash.")
        code = self.hex4(self.pos + 2)
        self.pos += 6
        if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", self.pos):
            low = self.hex4(self.pos + 2)
            if 0xDC00 <= low < 0xE000:
                self.pos += 6
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        if 0xD800 <= code < 0xE000:
            raise self.error(
                f"\\u{code:04x} is half of a surrogate pair", "Write both halves, or the character itself."
            )
        return chr(code)

    def hex4(self, pos: int) -> int:
        match = _HEX4.match(self.text, pos)
        if not match:
            raise self.error("\\u needs four hexadecimal digits")
        return int(match.group(), 16)

    def multiline(self) -> str:
        """Read a ''' string, without the indentation of its opening quotes and without the outer line ends."""
        start = self.pos
        before = bisect.bisect_left(self.newlines, start)
        indent = start - (self.newlines[before - 1] + 1 if before else 0)
        end = self.text.find("'''", start + 3)
        if end < 0:
            raise self.error("this ''' string is never closed", pos=start)
        self.pos = end + 3
        first, *rest = self.text[start + 3 : end].replace("\r\n", "\n").split("\n")
        lines = [] if rest and not first.strip(" \t") else [first]
        for line in rest:
            blank = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(indent, blank) :])
        if rest and not lines[-1].strip(" \t"):
            lines.pop()  # the line that holds the closing quotes
        return "\n".join(lines)

    # --- values

    def document(self) -> Any:
        first = self.space()
        if first == "[":
            value: Any = self.array((), 0)
        elif first == "{":
            value = self.object((), 0)
        else:
            value = self.members((), 0, closing="")
        if self.space():
            raise self.error(f"expected the end of the document, found {self.text[self.pos]!r}", self.swallowed())
        return value

    def value(self, path: KeyPath, depth: int) -> Any:
        char = self.text[self.pos : self.pos + 1]
        if depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} objects and lists inside each other")
        if char == "{":
            return self.object(path, depth)
        if char == "[":
            return self.array(path, depth)
        if self.text.startswith("'''", self.pos):
            return self.multiline()
        if char and char in "\"'":
            return self.quoted(char)
        if not char or char in ",:]}":
            raise self.error(f"{dotted(path)} has no value: found {char!r}" if char else f"{dotted(path)} has no value")
        return self.unquoted_value()

    def unquoted_value(self) -> Any:
        word = _WORD.match(self.text, self.pos)
        if word:
            name = word.group(1)
            if name not in _WORDS:
                better = f"Write {_MEANT[name]}." if name in _MEANT else "Write a finite number, or quote the word."
                raise self.error(f"{name} is no JSON value", better)
            self.pos = word.end()
            return _WORDS[name]
        number = _NUMBER.match(self.text, self.pos)
        if number:
            return self.number(number)
        end = self.text.find("\n", self.pos)
        start, self.pos = self.pos, len(self.text) if end < 0 else end
        text = self.text[start : self.pos].strip(" \t\r")
        self.unquoted.append((start, text))
        return text

    def number(self, match: re.Match[str]) -> int | float:
        digits = match.group().rstrip(" \t\r")
        is_float = match.group(1) or match.group(2)
        if len(digits) > _MAX_DIGITS and not is_float:
            raise self.error(f"a number of {len(digits)} digits")
        value = float(digits) if is_float else int(digits)
        if isinstance(value, float) and math.isinf(value):
            raise self.error(f"{digits} is beyond the largest float64")
        self.pos = match.end()
        return value

    def object(self, path: KeyPath, depth: int) -> dict[str, Any]:
        self.pos += 1
        return self.members(path, depth, closing="}")

    def members(self, path: KeyPath, depth: int, closing: str) -> dict[str, Any]:
        start, result = self.pos, dict[str, Any]()
        while (char := self.space()) != closing:
            if not char:
                raise self.error("this { is never closed", self.swallowed(), pos=max(start - 1, 0))
            key_pos = self.pos
            key = self.key()
            if self.space() != ":":
                after = self.text[self.pos : self.pos + 1] or "the end of the document"
                raise self.error(
                    f"expected ':' after the key {key!r}, found {after!r}", "This must be a JSON or HJSON object."
                )
            self.pos += 1
            self.space()
            here, line = (*path, key), self.line(key_pos)
            if key in result:
                # What stands inside the second one must not overwrite the places of the first.
                self.duplicates.append(Duplicate(here, self.lines[here], line))
                saved_lines, self.lines = self.lines, {}
                self.value(here, depth + 1)
                self.lines = saved_lines
            else:
                self.lines[here] = line
                result[key] = self.value(here, depth + 1)
            if self.space() == ",":
                self.pos += 1
        self.pos += len(closing)
        return result

    def array(self, path: KeyPath, depth: int) -> list[Any]:
        start, elements = self.pos, list[Any]()
        self.pos += 1
        while (char := self.space()) != "]":
            if not char:
                raise self.error("this [ is never closed", self.swallowed(), pos=start)
            here = (*path, len(elements))
            self.lines[here] = self.line(self.pos)
            elements.append(self.value(here, depth + 1))
            if self.space() == ",":
                self.pos += 1
        self.pos += 1
        return elements
