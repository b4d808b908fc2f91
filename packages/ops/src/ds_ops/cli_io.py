"""`ds io bench` and `ds io tune`: how fast a folder's disk is, and which settings to write into the configuration."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ds_config.errors import DsError
from ds_config.sizes import positive_size

if TYPE_CHECKING:
    from ds_ops.io import Backend

__all__ = ["HELP", "SCREEN", "main", "register"]

HELP = "measure file I/O over block size, queue depth, workers and backends; find the best settings"
SCREEN = Path("-")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "what", choices=["bench", "tune"], help="bench: a table of all cases; tune: the best `aio` section"
    )
    parser.add_argument("folder", type=Path, nargs="+", help="folders on the disks to measure")
    parser.add_argument(
        "--size", type=positive_size, default=256 << 20, help="bytes moved per case, for example 400M (256M)"
    )
    parser.add_argument(
        "--block-size",
        type=positive_size,
        nargs="+",
        default=[1 << 20, 8 << 20],
        help="bytes of a request, as 1MB (default: 1MB 8MB)",
    )
    parser.add_argument("--queue-depth", type=int, nargs="+", default=[8, 32], help="requests under way at a time")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads that make requests")
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=["io_uring", "libaio", "threads", "python"],
        help="how the kernel is asked (default: all that work here)",
    )
    parser.add_argument("--no-read", action="store_true", help="measure no reads")
    parser.add_argument("--no-write", action="store_true", help="measure no writes")
    parser.add_argument("--buffered", action="store_true", help="through the page cache instead of O_DIRECT")
    parser.add_argument("--loops", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=SCREEN, metavar="FILE",
        help="last, without FILE: print JSON instead of tables; with FILE: also write every measurement there",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from ds_ops.io import backends  # which imports torch; `ds io --help` must not
    from ds_ops.io_bench import IOGrid, best_section, measure, table

    problems = backends()
    wanted = args.backend or [name for name, why in problems.items() if not why and name != "python"] or ["python"]
    for name in [name for name in wanted if problems[name]]:
        print(f"{name} left out: {problems[name]}", file=sys.stderr)
    usable = tuple(cast("Backend", name) for name in wanted if not problems[name])
    if not usable or (args.no_read and args.no_write):
        print("nothing to measure: no backend works, or both directions are switched off", file=sys.stderr)
        return 2
    grid = IOGrid(
        backends=usable,
        block_bytes=tuple(args.block_size),
        queue_depths=tuple(args.queue_depth),
        workers=tuple(args.workers),
        write=not args.no_write,
        read=not args.no_read,
        total_bytes=args.size,
        loops=args.loops,
        direct=not args.buffered,
    )
    everything: dict[str, object] = {}
    for folder in args.folder:
        try:
            rows = measure(grid, folder)
        except DsError as error:
            print(error, file=sys.stderr)
            return 1
        everything[str(folder)] = [row.as_dict() for row in rows]
        if args.json == SCREEN and args.what == "tune":
            everything[str(folder)] = {"aio": best_section(rows), "measured": everything[str(folder)]}
        elif args.json == SCREEN:
            continue
        elif args.what == "bench":
            print(f"{folder}\n{table(rows)}")
        else:
            print(json.dumps({"aio": best_section(rows)}, indent=2))
    if args.json:
        text = json.dumps(everything, indent=2)
        if args.json == SCREEN:
            print(text)
        else:
            args.json.write_text(text)
    return 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["io", *sys.argv[1:]]))
