"""`ds comm debug` and `ds comm bench`: why did the job end, and how fast are the collectives here?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ds_comm.launch import read_launch
from ds_config.errors import DsError
from ds_config.sizes import parse_bytes, size_argument

if TYPE_CHECKING:
    from ds_comm.sweep import BenchTiming

__all__ = ["HELP", "OPERATIONS", "SCREEN", "TORCH_OPERATIONS", "main", "register"]

HELP = "examine a job that was ended by the watchdog; measure collectives"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
TORCH_OPERATIONS = ("torch.all_reduce", "torch.all_gather", "torch.reduce_scatter")
"""Both are the names of `ds_comm.sweep.OPERATIONS`, which needs torch; `ds comm --help` does not."""
SCREEN = Path("-")
_SIZES = ("4K", "64K", "1M", "16M", "64M")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    commands = parser.add_subparsers(dest="what", required=True)
    debug = commands.add_parser("debug", help="print where ranks differ, from the dumps of their watchdogs")
    debug.add_argument("folder", type=Path, help="the folder that the [ds-comm] lines of the job name")
    debug.add_argument(
        "--job",
        metavar="NAME",
        help="the job to show, where several left dumps there; default: the one that wrote last",
    )
    debug.add_argument("--before", type=int, default=5, help="operations to print around the difference")
    debug.add_argument("--json", action="store_true", help="print JSON: what each rank said, all operations by group")
    bench = commands.add_parser("bench", help="time collectives; starts its own ranks unless a launcher did")
    bench.add_argument("--nproc", type=int, default=2, help="ranks to start on this host")
    bench.add_argument(
        "--ops",
        nargs="+",
        default=list(OPERATIONS),
        choices=OPERATIONS,
        metavar="OP",
        help=f"of {', '.join(OPERATIONS)} (default: all)",
    )
    bench.add_argument(
        "--torch",
        action="store_true",
        help=f"also {', '.join(TORCH_OPERATIONS)}: torch's own, which DDP, FSDP2 and DeepSpeed call; for `ds rehearse --links`",
    )
    bench.add_argument("--backends", nargs="+", default=["gloo"], help="names as torch knows them; they alternate")
    bench.add_argument("--dtypes", nargs="+", default=["float32"], help="of the tensors, as torch names them")
    bench.add_argument(
        "--sizes",
        nargs="+",
        type=size_argument,
        default=[parse_bytes(size) for size in _SIZES],
        help=f"bytes of a message, as 64KB (default: {' '.join(_SIZES)})",
    )
    bench.add_argument("--seconds", type=float, default=1.0, help="about how long to repeat each row")
    bench.add_argument(
        "--json", type=Path, nargs="?", const=SCREEN, metavar="FILE",
        help="print JSON instead of a table; with FILE print the table and write every timing there",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        if args.what == "debug":
            return _debug(args)
        if args.nproc > 1 and read_launch(os.environ) is None:
            return _start_ranks(args)
        return _bench(args)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1


def _debug(args: argparse.Namespace) -> int:
    from ds_comm.watch.dumps import as_dict, jobs_in, read_dumps, render

    dumps = read_dumps(args.folder, args.job)
    others = [job for job in jobs_in(args.folder) if job.name != dumps[0].job]
    if args.json:
        summaries = [{"job": job.name, "ranks": list(job.files), "written_s": job.written_s} for job in others]
        print(json.dumps({"job": dumps[0].job, "others": summaries, **as_dict(dumps)}, indent=1))
        return 0
    print(render(dumps, args.before))
    if others:
        print(
            f"\nThis was the job {dumps[0].job or 'without a name'}. Other jobs left dumps here, too; --job NAME shows one:"
        )
        print("\n".join(f"  {job}" for job in others))
    return 0


def _start_ranks(args: argparse.Namespace) -> int:
    """Run this command again as ranks that find each other on a free port."""
    again = [sys.executable, "-m", "ds_comm.cli", *map(str, _arguments(args))]
    here = {"PMI_SIZE": args.nproc, "MPI_LOCALNRANKS": args.nproc, "OMP_NUM_THREADS": 1}
    ranks = [
        subprocess.Popen(again, env=os.environ | _texts({**here, "PMI_RANK": rank, "MPI_LOCALRANKID": rank}))
        for rank in range(args.nproc)
    ]
    return max(rank.wait() for rank in ranks)


def _arguments(args: argparse.Namespace) -> list[object]:
    torchs = ["--torch"] if args.torch else []
    listed = [
        "--ops",
        *args.ops,
        "--backends",
        *args.backends,
        "--dtypes",
        *args.dtypes,
        "--sizes",
        *args.sizes,
        *torchs,
    ]
    return ["bench", "--nproc", 1, *listed, "--seconds", args.seconds, *(["--json", args.json] if args.json else [])]


def _texts(env: dict[str, int]) -> dict[str, str]:
    return {name: str(value) for name, value in env.items()}


def _bench(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import ds_comm
    from ds_comm.sweep import cases, sweep

    world = ds_comm.init_distributed("gloo")
    if world.size == 1:
        print("a world of one communicates nothing: use --nproc 2 or more", file=sys.stderr)
        return 2
    groups = {}
    for backend in args.backends:
        pg = world.pg if backend == "gloo" else dist.new_group(backend=backend)
        groups[backend] = ds_comm.Group(backend, world.ranks, world.rank, pg)
    dtypes = [getattr(torch, name) for name in args.dtypes]
    timings, torchs = [], TORCH_OPERATIONS if args.torch else ()
    shown = world.rank == 0 and args.json != SCREEN
    if shown:
        print(_HEAD)
    for timing in sweep(groups, cases([*args.ops, *torchs], args.backends, dtypes, args.sizes), args.seconds):
        timings.append(timing)
        if shown:
            print(_line(timing), flush=True)
    if world.rank == 0 and args.json:
        text = json.dumps([_plain(timing) for timing in timings], indent=1)
        if args.json == SCREEN:
            print(text)
        else:
            args.json.write_text(text)
    ds_comm.destroy_process_group()
    return 0


_HEAD = f"{'op':<16}{'backend':<10}{'dtype':<10}{'bytes':>12}{'median us':>12}{'best us':>12}{'alg GB/s':>10}{'bus GB/s':>10}"


def _line(timing: BenchTiming) -> str:
    case, gbytes = timing.case, 1 / 8
    dtype = str(case.dtype).removeprefix("torch.")
    times = f"{timing.median_s * 1e6:>12.1f}{timing.best_s * 1e6:>12.1f}"
    speeds = f"{timing.algorithm_gbps * gbytes:>10.2f}{timing.bus_gbps * gbytes:>10.2f}"
    return f"{case.op:<16}{case.backend:<10}{dtype:<10}{case.nbytes:>12}{times}{speeds}"


def _plain(timing: BenchTiming) -> dict[str, object]:
    plain = asdict(timing)
    plain["case"]["dtype"] = str(timing.case.dtype).removeprefix("torch.")
    return plain


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="ds comm")
    register(_parser)
    raise SystemExit(main(_parser.parse_args()))
