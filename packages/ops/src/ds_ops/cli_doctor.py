"""`ds doctor`: which backend runs each op here, why no better one does, and what is wrong with this machine."""

from __future__ import annotations

import argparse

from ds_ops.cli_tables import show
from ds_ops.doctor import Verdict, diagnose
from ds_ops.machine import read_machine

__all__ = ["HELP", "main", "register"]

HELP = "say which backend runs each op, why no better one does, and what is broken (exit status 1)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(args: argparse.Namespace) -> int:
    """Show ops and what is not as it could be; 1 if something is broken."""
    diagnosis = diagnose(read_machine())
    notable = [check for check in diagnosis.checks if check.verdict in (Verdict.SLOWER, Verdict.BROKEN)]
    return show(diagnosis, as_json=args.json, checks=notable)
