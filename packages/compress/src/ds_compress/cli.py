"""`ds compress report MODEL`: bytes, bits, zeros and expected speed of a model's layers."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["HELP", "main", "register"]

HELP = "say what a model is made of, layer by layer"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    commands = parser.add_subparsers(dest="compress_command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="bytes, bits, zeros and expected speed of each layer")
    report.add_argument("model", help="a folder of safetensors, or one such file")
    report.add_argument("--json", action="store_true", help="print JSON instead of a table")
    report.add_argument("--picture", metavar="FILE", help="also draw it (png, svg, pdf); needs ds-compress[plot]")


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 when there is nothing to read."""
    # Reading tensors needs torch; `ds --help` must not.
    from rich.console import Console
    from rich.table import Table

    from ds_compress.sparsity_report import picture, report_of, table_of
    from ds_config.errors import DsError

    try:
        layers = report_of(args.model)
        if args.picture:
            picture(layers, args.picture)
    except DsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.json:
        rows = [
            {
                "name": one.name,
                "numel": one.numel,
                "bytes": one.bytes,
                "bits": one.bits,
                "zeros": one.zeros,
                "speed": one.speed,
            }
            for one in layers
        ]
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("layer")
    for name in ("weights", "KiB", "bits", "zeros", "x of 16 bits"):
        table.add_column(name, justify="right")
    rows_of_text = table_of(layers)
    for row in rows_of_text[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows_of_text[-1])
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has no width
    console.print(table)
    print("x of 16 bits: times faster where reading weights is all that takes time, as in generation of few sequences")
    return 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["compress", *sys.argv[1:]]))
