"""`ds data`: look at token files."""

from __future__ import annotations

import argparse
import sys

__all__ = ["HELP", "main", "register"]

HELP = "check token files, or make them from text"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check}")
    check = actions.add_parser("check", help="look at every value of token files; 1 when one has a problem")
    check.add_argument("files", nargs="+", help="common name of a .bin and a .idx file")
    check.add_argument("--vocabulary", type=int, metavar="N", help="larger ids than N - 1 are a problem")
    check.add_argument("--table", choices=("megatron", "deepspeed"), help="what format codes mean (default: found out)")


def main(args: argparse.Namespace) -> int:
    """Do what was asked; 1 when something is wrong with a file."""
    from ds_config.errors import DsError  # numpy and torch are slow to import; `ds --help` must not

    try:
        return _check(args)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    from ds_data.checking import check_tokens

    reports = [check_tokens(file, vocabulary=args.vocabulary, table=args.table) for file in args.files]
    print("\n\n".join(map(str, reports)))
    return int(any(report.problems for report in reports))
