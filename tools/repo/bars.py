"""Horizontal bars as SVG: a card with a title, rows of a label, a bar and a number. Pure text, the same bytes for the same input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Bar", "Chart", "boxes", "svg"]

_OURS, _THEIRS, _LIMIT, _INK, _SOFT = "#3949ab", "#b0b7c9", "#7e8794", "#1f2430", "#4b5263"
_FONT = "font-family='system-ui,-apple-system,Segoe UI,Roboto,sans-serif'"
_LABEL, _WIDTH, _ROW = 260, 760, 26


@dataclass(frozen=True, slots=True)
class Bar:
    """One row. `kind` is "ours", "theirs" or "limit" (what nothing can beat)."""

    label: str
    value: float
    kind: str = "theirs"


@dataclass(frozen=True, slots=True)
class Chart:
    """A title, what is good, and bars of one unit.

    Attributes:
        note: Below the title: what was measured, and whether more or less is better.
        digits: After the point.
    """

    title: str
    note: str
    unit: str
    bars: Sequence[Bar]
    digits: int = 0


def svg(charts: Sequence[Chart]) -> str:
    """One card with the charts below each other."""
    y, parts = 0, list[str]()
    for chart in charts:
        parts.append(_text(16, y + 26, chart.title, _INK, 16, "600"))
        parts.append(_text(16, y + 44, chart.note, _SOFT, 12))
        y += 56
        most = max(bar.value for bar in chart.bars)
        for bar in chart.bars:
            width = max(2.0, (_WIDTH - _LABEL - 150) * bar.value / most)
            colour = {"ours": _OURS, "limit": _LIMIT}.get(bar.kind, _THEIRS)
            weight = "600" if bar.kind == "ours" else "400"
            parts.append(_text(_LABEL - 8, y + 17, bar.label, _INK, 13, weight, "end"))
            parts.append(
                f"<rect x='{_LABEL}' y='{y + 4}' width='{width:.1f}' height='{_ROW - 8}' rx='3' fill='{colour}'/>"
            )
            number = f"{bar.value:,.{chart.digits}f} {chart.unit}".strip()
            parts.append(_text(round(_LABEL + width + 8, 1), y + 17, number, _INK, 13, weight))
            y += _ROW
        y += 12
    told = escape("; ".join(chart.title for chart in charts))
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {y}' role='img' aria-label='{told}'>"
    card = f"<rect width='{_WIDTH}' height='{y}' rx='8' fill='#ffffff'/>"
    return "\n".join([head, card, *parts, "</svg>"]) + "\n"


def boxes(rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Rows of boxes from the top down, an arrow between; each box has a name and a few words, each row a title at its left."""
    width, height, y, parts = 1040, 58, 14, list[str]()
    for i, (title, row) in enumerate(rows):
        parts.append(
            f"<rect x='8' y='{y}' width='{width - 16}' height='{height + 32}' rx='8' fill='{'#eef0f8' if title else '#ffffff'}'/>"
        )
        parts.append(_text(22, y + 19, title, _SOFT, 13))
        each = min(300.0, (width - 40) / len(row) - 10)
        x = (width - len(row) * (each + 10) + 10) / 2
        for name, words in row:
            top, tall = y + 26, height - 4
            fill, ink = ("#3949ab", "#ffffff") if name.startswith("ds-") else ("#ffffff", _INK)
            parts.append(
                f"<rect x='{x:.1f}' y='{top}' width='{each:.1f}' height='{tall}' rx='6' fill='{fill}' stroke='{_OURS}'/>"
            )
            middle = x + each / 2
            parts.append(_text(round(middle, 1), top + (24 if words else 32), name, ink, 16, "600", "middle"))
            parts.append(_text(round(middle, 1), top + 43, words, ink, 13, "400", "middle"))
            x += each + 10
        y += height + 32
        if i < len(rows) - 1:
            parts.append(f"<path d='M{width / 2 - 7} {y + 3} h14 l-7 9 z' fill='{_LIMIT}'/>")
        y += 15
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {y}' role='img' aria-label='The packages and what each is for'>"
    return "\n".join([head, f"<rect width='{width}' height='{y}' rx='8' fill='#ffffff'/>", *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, colour: str, size: int, weight: str = "400", anchor: str = "start") -> str:
    style = f"{_FONT} font-size='{size}' font-weight='{weight}' fill='{colour}' text-anchor='{anchor}'"
    return f"<text x='{x}' y='{y}' {style}>{escape(text)}</text>"
