"""`ds report`: everything `ds doctor` looked at, for a bug report."""

from __future__ import annotations

import argparse

from ds_ops.cli_tables import show
from ds_ops.doctor import diagnose
from ds_ops.machine import read_machine

__all__ = ["HELP", "main", "register"]

HELP = "report torch, devices, compilers, native modules, file I/O, limits and ops (for a bug report)"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Show every check and every op; 1 if something is broken."""
    diagnosis = diagnose(read_machine())
    return show(diagnosis, as_json=args.json, checks=diagnosis.checks)
