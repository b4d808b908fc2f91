"""`ds report`: what is installed and visible here, what runs where, what is wrong. `ds env` and `ds doctor` are shorter ways to ask."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_config.report_tables import Check, PackageReport, ReportLevel
from ds_launcher.launch_report import as_dict, gather, merged, torch_here

if TYPE_CHECKING:
    import rich.table

__all__ = ["HELP", "main", "register", "show"]

HELP = "report packages, devices, tools, native modules, file I/O and ops, and what is broken (exit status 1)"

_WIDTH = 140  # of a file or a pipe
_STYLE = {
    ReportLevel.FINE: "green",
    ReportLevel.INFO: "default",
    ReportLevel.SLOWER: "yellow",
    ReportLevel.BROKEN: "bold red",
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--quick", action="store_true", help="only what is known at once, without torch (`ds env`)")
    parser.add_argument(
        "--notable", action="store_true", help="of all checks only what is slower than need be, or broken (`ds doctor`)"
    )
    parser.add_argument("--torch", action="store_true", help="also import torch here and ask it (with --quick, too)")
    parser.add_argument("--json", action="store_true", help="print JSON: always every check")


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if something is broken."""
    report = gather(args.quick)
    if args.torch:
        report = merged((report, torch_here()))
    if args.json:
        print(json.dumps(as_dict(report), indent=1))
    else:
        show(report, notable=args.notable)
    return 1 if _of(report, ReportLevel.BROKEN) else 0


def show(report: PackageReport, *, notable: bool = False) -> None:
    """Print a report as tables.

    Args:
        notable: Leave out the checks that are fine.
    """
    from rich.console import Console  # here and below: `ds report --help` does without
    from rich.markup import escape

    shown = [c for c in report.checks if not notable or c.verdict in (ReportLevel.SLOWER, ReportLevel.BROKEN)]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for section, rows in itertools.groupby(shown, key=lambda check: check.section):
        console.print(f"[bold]{section}[/bold]")
        console.print(_check_table(list(rows)))
    for table in report.tables:
        console.print(f"[bold]{escape(table.title)}[/bold]: {escape(table.note)}")
        grid = _grid(*table.heads)
        for row in table.rows:
            grid.add_row(*map(escape, row))
        console.print(grid)
    console.print(_summary(report))


def _grid(*columns: str) -> rich.table.Table:
    from rich.table import Table

    table = Table(box=None, show_header=bool(columns[0]), pad_edge=False, padding=(0, 2, 0, 2))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _check_table(checks: Sequence[Check]) -> rich.table.Table:
    from rich.markup import escape

    table = _grid("", "", "")
    for check in checks:
        fix = f"\n-> {check.fix}" if check.fix else ""
        mark = f"[{_STYLE[check.verdict]}]{check.verdict.value}[/]"
        table.add_row(
            escape(check.name), mark if check.verdict is not ReportLevel.INFO else "", escape(check.result + fix)
        )
    return table


def _of(report: PackageReport, verdict: ReportLevel) -> list[Check]:
    return [check for check in report.checks if check.verdict is verdict]


def _summary(report: PackageReport) -> str:
    from rich.markup import escape

    if broken := _of(report, ReportLevel.BROKEN):
        return f"[bold red]{len(broken)} broken[/]: {escape(_names(broken))}"
    if slower := _of(report, ReportLevel.SLOWER):
        return f"[green]nothing is broken[/]; [yellow]{len(slower)} could be better[/]: {escape(_names(slower))}"
    return "[green]nothing is broken[/]"


def _names(checks: Sequence[Check]) -> str:
    return ", ".join(f"{check.section} {check.name}" for check in checks)
