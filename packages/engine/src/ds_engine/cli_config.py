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
    from ds_engine.config import Config, explain_config, load_config
    from ds_engine.rules import check_rules

    try:
        if args.action == "schema":
            print(json.dumps(json_schema(Config), indent=2))
        elif args.action == "explain":
            print(explain_config(args.config))
        else:
            if args.keys:
                print("\n".join(map(str, classify(Config, args.config))))
            config = load_config(args.config)
            if args.world is not None:
                check_rules(config, args.world)
            print(f"{args.config}: no problems")
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
