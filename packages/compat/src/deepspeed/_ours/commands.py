"""`deepspeed` and `ds_report`: the launcher's `ds run` and `ds env` under upstream's names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepspeed._ours.launching import decode_world_info
from ds_launcher.cli import main as ds

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "cli_main", "launch", "main", "report"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]


def main(args: Sequence[str] | None = None) -> int:
    """`ds run` with upstream's habit: the script gets `--local_rank=N` unless `--no_local_rank` is given."""
    return ds(["run", "--local-rank-arg", *(sys.argv[1:] if args is None else args)])


def launch(args: Sequence[str] | None = None) -> int:
    """`deepspeed.launcher.launch`: the ranks of this host, with upstream's `--world_info`, `--node_rank` and addresses."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--world_info", default="")
    for flag in ("--module", "--no_python", "--no_local_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args(args)
    world = decode_world_info(given.world_info) if given.world_info else {}
    counts = [slots if isinstance(slots, int) else len(slots) for slots in world.values()]
    flags = [flag for flag, on in (("--module", given.module), ("--no-python", given.no_python)) if on]
    many = ["--nnodes", str(len(counts)), "--node-rank", str(given.node_rank), "--master-addr", given.master_addr]
    return ds([
        "run", *flags, *([] if given.no_local_rank else ["--local-rank-arg"]),
        *(["--nproc", str(counts[given.node_rank])] if counts else []),
        *([*many, "--master-port", str(given.master_port)] if len(counts) > 1 else []),
        given.training_script, *given.training_script_args,
    ])  # fmt: skip


def report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> int:
    """`ds env`."""
    del hide_operator_status, hide_errors_and_warnings
    return ds(["env"])


def cli_main() -> int:
    """The program `ds_report`."""
    return report()
