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
        "--notable",
        action="store_true",
        help="only what is broken or slower than need be, what can be acted on first (`ds doctor`)",
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
        notable: Print what is broken, then what is slower and can be helped, then the rest of what is slower; no tables.
    """
    from rich.console import Console  # here and below: `ds report --help` does without
    from rich.markup import escape

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for title, shown in _notable(report) if notable else _sections(report):
        console.print(f"[bold]{title}[/bold]")
        console.print(_check_table(shown, sections=notable))
    for table in report.tables if not notable else ():
        console.print(f"[bold]{escape(table.title)}[/bold]: {escape(table.note)}")
        grid = _grid(*table.heads)
        for row in table.rows:
            grid.add_row(*map(escape, row))
        console.print(grid)
    if notable and report.tables:
        names = ", ".join(f"{escape(table.title)} ({len(table.rows)} rows)" for table in report.tables)
        console.print(f"`ds report` has all checks, and the tables {names}")
    console.print(_summary(report))


def _sections(report: PackageReport) -> list[tuple[str, list[Check]]]:
    return [(title, list(rows)) for title, rows in itertools.groupby(report.checks, key=lambda check: check.section)]


def _notable(report: PackageReport) -> list[tuple[str, list[Check]]]:
    """Group the checks that are not fine by what somebody can do about them."""
    slower = _of(report, ReportLevel.SLOWER)
    groups = {
        "broken": _of(report, ReportLevel.BROKEN),
        "can be better": [check for check in slower if check.fix],
        "slower, and nothing to be done here": [check for check in slower if not check.fix],
    }
    return [(title, checks) for title, checks in groups.items() if checks]


def _grid(*columns: str) -> rich.table.Table:
    from rich.table import Table

    table = Table(box=None, show_header=bool(columns[0]), pad_edge=False, padding=(0, 2, 0, 2))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _check_table(checks: Sequence[Check], *, sections: bool = False) -> rich.table.Table:
    from rich.markup import escape

    table = _grid("", "", "")
    for check in checks:
        fix = f"\n-> {check.fix}" if check.fix else ""
        mark = f"[{_STYLE[check.verdict]}]{check.verdict.value}[/]"
        name = f"{check.section} {check.name}" if sections else check.name
        table.add_row(escape(name), mark if check.verdict is not ReportLevel.INFO else "", escape(check.result + fix))
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


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["report", *sys.argv[1:]]))
