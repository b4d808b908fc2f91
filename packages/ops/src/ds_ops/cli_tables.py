"""Shows a diagnosis as tables: what `ds doctor` and `ds report` have in common."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_ops.doctor import Check, Diagnosis, OpRow, Verdict

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show"]

_WIDTH = 140  # of a file or a pipe
_STYLE = {Verdict.FINE: "green", Verdict.INFO: "default", Verdict.SLOWER: "yellow", Verdict.BROKEN: "bold red"}


def show(diagnosis: Diagnosis, *, as_json: bool, checks: Sequence[Check]) -> int:
    """Print all ops and the given checks; the exit status: 1 if something is broken.

    Args:
        as_json: Print everything as one JSON object instead.
    """
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=1))
    else:
        from rich.console import Console  # here and below: `ds report --help` does without

        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        for section, rows in itertools.groupby(checks, key=lambda check: check.section):
            console.print(f"[bold]{section}[/bold]")
            console.print(_check_table(list(rows)))
        console.print("[bold]ops[/bold]: the backend that runs, and why a better one does not")
        console.print(_op_table(diagnosis.ops))
        console.print(_summary(diagnosis))
    return 1 if diagnosis.broken else 0


def _grid(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=bool(columns[0]), pad_edge=False, padding=(0, 2, 0, 2))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _check_table(checks: Sequence[Check]) -> Table:
    from rich.markup import escape

    table = _grid("", "", "")
    for check in checks:
        fix = f"\n-> {check.fix}" if check.fix else ""
        mark = f"[{_STYLE[check.verdict]}]{check.verdict.value}[/]"
        table.add_row(check.name, mark if check.verdict is not Verdict.INFO else "", escape(check.found + fix))
    return table


def _op_table(ops: Sequence[OpRow]) -> Table:
    """Ops that are treated alike share a row."""
    from rich.markup import escape

    alike: dict[tuple[object, ...], list[OpRow]] = {}
    for row in ops:
        alike.setdefault((row.device, row.dtypes, row.backend, row.why_not), []).append(row)
    table = _grid("device", "dtypes", "backend", "why not better", "ops")
    for first, *rest in alike.values():
        why = "\n".join(f"{backend}: {reason}{f' -> {fix}' if fix else ''}" for backend, reason, fix in first.why_not)
        backend = escape(first.backend) or "[bold red]none[/]"
        names = ", ".join(row.op for row in (first, *rest))
        table.add_row(first.device, _short(" ".join(first.dtypes)), backend, escape(_short(why)), escape(names))
    return table


def _short(text: str) -> str:
    """float32 as people say it."""
    return text.replace("torch.", "").replace("bfloat", "bf").replace("float", "fp")


def _summary(diagnosis: Diagnosis) -> str:
    from rich.markup import escape

    slower = [check for check in diagnosis.checks if check.verdict is Verdict.SLOWER]
    if diagnosis.broken:
        names = ", ".join(f"{check.section} {check.name}" for check in diagnosis.broken)
        return f"[bold red]{len(diagnosis.broken)} broken[/]: {escape(names)}"
    if slower:
        names = ", ".join(f"{check.section} {check.name}" for check in slower)
        return f"[green]nothing is broken[/]; [yellow]{len(slower)} could be better[/]: {escape(names)}"
    return "[green]nothing is broken[/]"
