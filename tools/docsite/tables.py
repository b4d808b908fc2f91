"""Tables that can be read in a narrow column: cells that know their heading, and code that may break at its separators. Pure.

A phone shows each row as a card, for which `site.css` takes the heading of a cell from `data-label`; a tablet does so for tables of many columns.
"""

from __future__ import annotations

import html
import re

__all__ = ["label_cells", "with_breaks"]

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<td(?P<attributes>[^>]*)>(?P<inner>.*?)</td>", re.DOTALL)
_CODE = re.compile(r"(<code[^>]*>)(.*?)(</code>)", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_WIDE = 7  # columns from which on a tablet shows cards, too
# Where a long name may go on in the next line. An entity (`&lt;`) or a tag is not cut.
_SEPARATOR = re.compile(r"(<[^>]+>|&\w+;|&#\d+;)|([._/,=:|(\[-]+)(?=\w)")
_LONG = re.compile(r"<[^>]+>|[A-Za-z0-9]{18,}")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def label_cells(page: str) -> str:
    """Return the HTML of a page in which every cell of a plain table has its heading, and code in it may break."""
    return _TABLE.sub(lambda match: _table(match[0]), page)


def with_breaks(code: str) -> str:
    """Return the HTML of a piece of code that may break after its separators, and a long name before its capitals."""
    humps = _LONG.sub(lambda match: match[0] if match[0].startswith("<") else _HUMP.sub("<wbr>", match[0]), code)
    return _SEPARATOR.sub(lambda match: match[1] or f"{match[2]}<wbr>", humps)


def _table(table: str) -> str:
    head, _, _ = table.partition("</thead>")
    labels = [html.escape(html.unescape(_TAG.sub("", text)).strip(), quote=True) for text in _HEADING.findall(head)]

    def row(match: re.Match[str]) -> str:
        names = iter(labels)

        def cell(found: re.Match[str]) -> str:
            inner = _CODE.sub(lambda code: code[1] + with_breaks(code[2]) + code[3], found["inner"])
            label = next(names, "")
            name = f' data-label="{label}"' if label else ""
            return f"<td{found['attributes']}{name}>{inner}</td>"

        return f"<tr>{_CELL.sub(cell, match[1])}</tr>"

    wide = ' data-wide=""' if len(labels) >= _WIDE else ""
    return _ROW.sub(row, table).replace("<table>", f"<table{wide}>", 1)
