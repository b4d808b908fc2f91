"""`ds config`: check a configuration, say where each value comes from, print the schema for editors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_config import KeyReport
    from ds_config.errors import DsError

__all__ = ["HELP", "main", "register"]

HELP = "check or explain a configuration, or print its JSON schema"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,explain,schema}")
    check = actions.add_parser("check", help="report every problem of a file")
    check.add_argument("config", help="JSON or HJSON configuration")
    check.add_argument("--world-size", dest="world", type=int, metavar="N", help="also check batch sizes and mesh for N ranks")
    check.add_argument("--keys", action="store_true", help="say of every key what becomes of it")
    check.add_argument("--json", action="store_true", help="print JSON: every problem, with --keys every key")
    explain = actions.add_parser("explain", help="every value, and the line or default it comes from")
    explain.add_argument("config", help="JSON or HJSON configuration")
    explain.add_argument("--json", action="store_true", help="print JSON: a list of keys with value and origin")
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
            print(json.dumps(_explained(args.config), indent=1) if args.json else explain_config(args.config))
        else:
            keys = classify(Config, args.config) if args.keys else ()
            if args.json:
                return _check_as_json(args.config, args.world, keys)
            if keys:
                print("\n".join(map(str, keys)))
            return _check(args.config, args.world)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _explained(file: str) -> list[dict[str, Any]]:
    from ds_config.explaining import values
    from ds_config.origin import Provenance
    from ds_config.parse import dotted
    from ds_engine.config import load_config

    provenance = Provenance()
    config = load_config(file, provenance=provenance)
    rows = values(config)
    return [
        {"key": dotted(path), "value": _plain(value), "origin": str(provenance.of(path))} for path, value, _ in rows
    ]


def _plain(value: Any) -> Any:
    """Convert a value to JSON values; unknown types become their text."""
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    finite = not isinstance(value, float) or abs(value) < float("inf")
    return value if finite and (value is None or isinstance(value, bool | int | float | str)) else str(value)


def _check_as_json(file: str, world: int | None, keys: Sequence[KeyReport]) -> int:
    from ds_config.parse import dotted

    wrong, broken = _problems(file, world)
    errors = [*([wrong] if wrong is not None else []), *broken]
    report: dict[str, Any] = {"file": file, "problems": [_problem(error) for error in errors]}
    if keys:
        report["keys"] = [{"key": dotted(k.path), "kind": k.kind, "why": k.why, "origin": str(k.origin)} for k in keys]
    print(json.dumps(report, indent=1))
    return 1 if errors else 0


def _problem(error: DsError) -> dict[str, Any]:
    from ds_config.parse import dotted

    issues = [
        {"code": i.code, "key": dotted(i.path), "origin": str(i.origin), "message": i.message, "fix": i.fix}
        for i in getattr(error, "issues", ())
    ]
    return {
        "type": type(error).__name__,
        "code": error.code,
        "message": error.message,
        "fix": error.fix,
        "issues": issues,
    }


def _problems(file: str, world: int | None) -> tuple[DsError | None, list[DsError]]:
    """Check a file's keys and values, and the rules that valid values break together."""
    from ds_engine.config import examine_config
    from ds_engine.config_rules import AXES, broken_rules, lasting_problems

    config, wrong = examine_config(file)
    broken: list[DsError] = []
    if config is not None:
        broken = list(lasting_problems(config) if world is None else broken_rules(config, world, AXES)[1])
    return wrong, broken


def _check(file: str, world: int | None) -> int:
    """Print everything that is wrong with a file."""
    wrong, broken = _problems(file, world)
    if wrong is not None:
        print(f"{type(wrong).__name__}: {wrong}", file=sys.stderr)
        print("without what is wrong there:" if broken else "nothing else is wrong", file=sys.stderr)
    for error in broken:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if wrong is None and not broken:
        print(f"{file}: no problems")
    return 1 if wrong is not None or broken else 0
