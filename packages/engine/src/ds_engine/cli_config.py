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
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,explain,key,schema}")
    check = actions.add_parser("check", help="report every problem of a file")
    check.add_argument("config", help="JSON or HJSON configuration")
    check.add_argument(
        "--world-size", dest="world", type=int, metavar="N", help="also check batch sizes and mesh for N ranks"
    )
    check.add_argument("--client", choices=("hf",), help='who fills in "auto": hf is the Trainer of Hugging Face')
    check.add_argument(
        "--model", metavar="MODEL", help="also check what only this model decides; as of `ds plan --model`"
    )
    check.add_argument("--keys", action="store_true", help="say of every key what becomes of it")
    check.add_argument("--json", action="store_true", help="print JSON: every problem, with --keys every key")
    explain = actions.add_parser("explain", help="every value, and the line or default it comes from")
    explain.add_argument("config", help="JSON or HJSON configuration")
    explain.add_argument("--json", action="store_true", help="print JSON: a list of keys with value and origin")
    key = actions.add_parser("key", help="what a key means, and which values it takes")
    key.add_argument(
        "names", nargs="+", metavar="KEY", help="dotted path, as zero_optimization.stage, or its last part"
    )
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
        elif args.action == "key":
            return _show_keys(args.names)
        elif args.action == "explain":
            print(json.dumps(_explained(args.config), indent=1) if args.json else explain_config(args.config))
        else:
            keys = classify(Config, args.config) if args.keys else ()
            if args.json:
                return _check_as_json(args, keys)
            if keys:
                print("\n".join(map(str, keys)))
            return _check(args)
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


def _show_keys(names: Sequence[str]) -> int:
    """Print the keys of these names; 1 where one is unknown."""
    from ds_config.did_you_mean import nearest
    from ds_config.parse import dotted
    from ds_config.shape import describe, keys, of_field, retired
    from ds_engine.config import Config

    known = {dotted(key.path).replace("[0]", ".0"): key for key in keys(Config)}
    status = 0
    for name in names:
        meant = [name] if name in known else [path for path in known if path.rpartition(".")[2] == name]
        if not meant:
            hint = "".join(f"; did you mean {near}?" for near in nearest(name, known))
            print(f"there is no key {name[:200]!r}{hint}", file=sys.stderr)
            status = 1
        for path in meant:
            field = known[path].model.model_fields[known[path].field]
            default = "must be given" if field.is_required() else repr(field.get_default(call_default_factory=True))
            print(f"{path}: {describe(of_field(field))}; default: {default[:200]}")
            if (reason := retired(field)) is not None:
                print(f"  {reason}")
            if field.description:
                print(f"  {field.description}")
    return status


def _check_as_json(args: argparse.Namespace, keys: Sequence[KeyReport]) -> int:
    from ds_config.parse import dotted

    wrong, broken, filled = _problems(args)
    errors = [*([wrong] if wrong is not None else []), *broken]
    report: dict[str, Any] = {"file": args.config, "problems": [_problem(error) for error in errors], "auto": filled}
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


def _problems(args: argparse.Namespace) -> tuple[DsError | None, list[DsError], list[str]]:
    """Check a file's keys and values, and what a start refuses of valid values; and list the keys that the client fills in."""
    from ds_engine.config import examine_config
    from ds_engine.config_trial import answers_of, refusals
    from ds_engine.models import model_from

    answers, filled = answers_of(args.client, args.config)
    config, wrong = examine_config(args.config, auto=answers)
    shapes, model = model_from(args.model) if args.model else (None, None)
    broken = [] if config is None else refusals(config, args.world, shapes, model)
    return wrong, broken, filled


def _check(args: argparse.Namespace) -> int:
    """Print everything that is wrong with a file."""
    from ds_engine.config_trial import CLIENTS

    wrong, broken, filled = _problems(args)
    if filled:
        values = "1 value is" if len(filled) == 1 else f"{len(filled)} values are"
        print(f"{values} filled in by {CLIENTS[args.client]}: {', '.join(filled)}")
    if wrong is not None:
        print(f"{type(wrong).__name__}: {wrong}", file=sys.stderr)
        print("also, once these are fixed:" if broken else "no further problems", file=sys.stderr)
    for error in broken:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if wrong is None and not broken:
        print(f"{args.config}: no problems")
    return 1 if wrong is not None or broken else 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["config", *sys.argv[1:]]))
