"""`ds config`: check a configuration, say where each value comes from, print the schema for editors."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["HELP", "main", "register"]

HELP = "check or explain a configuration, or print its JSON schema"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,explain,schema}")
    check = actions.add_parser("check", help="report every problem of a file")
    check.add_argument("config", help="JSON or HJSON configuration")
    check.add_argument("--world", type=int, metavar="N", help="also check batch sizes and mesh for N ranks")
    check.add_argument("--keys", action="store_true", help="say of every key what becomes of it")
    explain = actions.add_parser("explain", help="every value, and the line or default it comes from")
    explain.add_argument("config", help="JSON or HJSON configuration")
    actions.add_parser("schema", help="JSON Schema of the configuration")


def main(args: argparse.Namespace) -> int:
    """Do what was asked; 1 when the configuration has problems."""
    # The models need pydantic and torch; `ds --help` must not.
    from ds_config import classify, json_schema
    from ds_config.errors import DsError
    from ds_engine.config import Config, explain_config

    try:
        if args.action == "schema":
            print(json.dumps(json_schema(Config), indent=2))
        elif args.action == "explain":
            print(explain_config(args.config))
        else:
            if args.keys:
                print("\n".join(map(str, classify(Config, args.config))))
            return _check(args.config, args.world)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _check(file: str, world: int | None) -> int:
    """Print everything that is wrong with a file: its keys and values, and what the right ones do not go together with."""
    from ds_engine.config import examine_config
    from ds_engine.rules import AXES, broken_rules, lasting_problems

    config, wrong = examine_config(file)
    if config is None:
        broken = []
    else:
        broken = list(lasting_problems(config) if world is None else broken_rules(config, world, AXES)[1])
    if wrong is not None:
        print(f"{type(wrong).__name__}: {wrong}", file=sys.stderr)
        print("without what is wrong there:" if broken else "nothing else is wrong", file=sys.stderr)
    for error in broken:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if wrong is None and not broken:
        print(f"{file}: no problems")
    return 1 if wrong is not None or broken else 0
