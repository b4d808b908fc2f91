"""`ds data`: look at token files, or make them from text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

__all__ = ["HELP", "main", "register"]

HELP = "check token files, or make them from text"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,tokenize}")
    check = actions.add_parser("check", help="look at every value of token files; 1 when one has a problem")
    check.add_argument("files", nargs="+", help="common name of a .bin and a .idx file")
    check.add_argument("--vocabulary", type=int, metavar="N", help="larger ids than N - 1 are a problem")
    check.add_argument("--table", choices=("megatron", "deepspeed"), help="what format codes mean (default: found out)")
    check.add_argument("--json", action="store_true", help="print JSON: a list, one object a file")
    make = actions.add_parser("tokenize", help="make a token file of text and JSONL files")
    make.add_argument("files", nargs="+", help="text (a document each) or .jsonl, also as .gz")
    make.add_argument("--tokenizer", required=True, help="a tokenizer.json, or a model's folder with one")
    make.add_argument("--out", required=True, metavar="PREFIX", help="common name of the .bin and the .idx file")
    make.add_argument("--key", default="text", help="of the text in .jsonl files (default: text)")
    make.add_argument("--lines", action="store_true", help="every line of a text file is a document")
    make.add_argument("--end", metavar="TOKEN", help="put this token behind every document, such as '<|endoftext|>'")
    make.add_argument("--table", choices=("megatron", "deepspeed"), default="megatron", help="what format codes mean")
    make.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Do what was asked; 1 when something is wrong with a file."""
    from ds_config.errors import DsError  # numpy and torch are slow to import; `ds --help` must not

    try:
        return _check(args) if args.action == "check" else _tokenize(args)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    from ds_data.file_checks import check_tokens

    reports = [check_tokens(file, vocabulary=args.vocabulary, table=args.table) for file in args.files]
    print(json.dumps([asdict(report) for report in reports], indent=1) if args.json else "\n\n".join(map(str, reports)))
    return int(any(report.problems for report in reports))


def _tokenize(args: argparse.Namespace) -> int:
    from ds_data.tokenizing import DocumentSource, open_tokenizer, tokenize

    tokenizer = open_tokenizer(args.tokenizer)
    source = DocumentSource(args.key, args.lines)
    with _bar(args.files) as progress:
        result = tokenize(
            args.files, args.out, tokenizer, source=source, end=args.end, table=args.table, progress=progress
        )
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    print(
        f"{result.prefix}: {result.tokens:,} tokens in {result.documents:,} documents ({result.dtype}); {result.empty:,} empty ones left out"
    )
    return 0


@contextmanager
def _bar(files: list[str]) -> Iterator[Callable[[int], None] | None]:
    """Show progress in bytes read on a terminal; yield None where there is no terminal or no rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:
        yield None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenize", total=sum(os.path.getsize(file) for file in files if os.path.isfile(file)))
        yield lambda read: bar.advance(task, read)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["data", *sys.argv[1:]]))
