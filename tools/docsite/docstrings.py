"""Docstrings as sections: what stands in one line of the source ("Cost: ...", "Collective over ...") is a paragraph of its own on a page.

A griffe extension: mkdocs.yml names it for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["DocstringSections", "with_sections"]

_LABELS = ("Returns", "Yields", "Raises", "Cost", "Reference", "Note")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)}): *(\S.*)$")
_INSIDE = re.compile(r"(?<=[.)]) +(?=Cost: )")
_HEADER = re.compile(r"^\w[\w ]*:$")


def with_sections(text: str) -> str:
    """Return a docstring in which each label has a section: its text is indented below it, with a blank line before."""
    out: list[str] = []
    inside = False  # below a label that stood beside its text
    for line in "\n".join(_INSIDE.sub("\n", row) for row in text.splitlines()).splitlines():
        if match := _LABEL.match(line):
            out += ["", f"{match[1]}:", f"    {match[2]}"]
            inside = True
        elif inside and line and not line.startswith(" ") and not _HEADER.match(line):
            out.append(f"    {line}")
        else:
            inside = False
            leaves_block = bool(out) and out[-1].startswith("    ") and line[:1].strip() != ""
            if _HEADER.match(line) or leaves_block:
                out.append("")
            out.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip("\n")


class DocstringSections(griffe.Extension):
    """Give every docstring its sections."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = with_sections(obj.docstring.value)
