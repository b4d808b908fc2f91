"""What is wrong with a configuration, one record per problem, and the one error that shows them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_config.errors import ConfigError, UnsupportedConfigError
from ds_config.origin import Origin
from ds_config.parse import KeyPath, dotted

__all__ = ["Issue", "error_of", "shown"]

_SHOWN_CHARS = 60
_SHOWN_ISSUES = 100
_SHOWN_BITS = 128
_SHOWN_KEYS = 12


@dataclass(frozen=True, slots=True)
class Issue:
    """One problem of one document.

    Attributes:
        code: What `ds explain` explains ("config-unknown-key", "config-value", ...).
        path: Where the key stands; empty for the document itself.
        origin: Who set it.
        message: Found and expected, with values, without the path.
        fix: What to do; may be empty where the message says it.
        suggestions: Known paths or values that were probably meant, best first.
    """

    code: str
    path: KeyPath
    origin: Origin
    message: str
    fix: str = ""
    suggestions: tuple[str, ...] = ()

    def __str__(self) -> str:
        # "dict" says nothing about where; the report's first line has it.
        place = "" if self.origin == Origin("dict") else str(self.origin)
        parts = (place, f"{dotted(self.path)}:" if self.path else "", self.message, self.fix)
        return " ".join(part for part in parts if part)


def shown(value: object) -> str:
    """Write a value the way a JSON file has it, shortened, with its kind where it could be taken for another."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
        return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + '..."'
    if isinstance(value, dict):
        keys = ", ".join(map(str, value))
        return "an object " + ("{}" if not value else "{" + (keys if len(keys) < 40 else keys[:37] + "...") + "}")
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # what cannot be written is no value of a file either
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def error_of(issues: Sequence[Issue], name: str, anchors: Sequence[str] = ()) -> ConfigError:
    """Make the one error that reports every issue of the document `name`, in the order of its lines.

    The `anchors` are the words of the command that explains its keys.

    Its code is that of the issues when they all have the same one, else "config-invalid". When every issue is something
    that is not built here it is an `UnsupportedConfigError`, which is also an `UnsupportedError`.
    """
    ordered = tuple(sorted(issues, key=lambda issue: issue.origin.line))
    codes = {issue.code for issue in ordered}
    code = codes.pop() if len(codes) == 1 else "config-invalid"
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    message = "\n".join(
        [
            f"{count} in the configuration ({name}):",
            *(f"  {issue}" for issue in ordered[:_SHOWN_ISSUES]),
            *([f"  and {len(ordered) - _SHOWN_ISSUES} more"] if len(ordered) > _SHOWN_ISSUES else []),
            *([f"  {' '.join(anchors[:_SHOWN_KEYS])}"] if anchors else []),
        ]
    )
    kind = UnsupportedConfigError if code == "config-unbuilt" else ConfigError
    return kind(message, code=code, issues=ordered)
