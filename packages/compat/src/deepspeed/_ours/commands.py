"""`deepspeed` and `ds_report`: the launcher's `ds run` and `ds env` under upstream's names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ds_launcher.cli import main as ds
from ds_launcher.inventory import read_hostfile

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "cli_main", "fetch_hostfile", "main", "report"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]


def main(args: Sequence[str] | None = None) -> int:
    """`ds run` with upstream's habit: the script gets `--local_rank=N` unless `--no_local_rank` is given."""
    return ds(["run", "--local-rank-arg", *(sys.argv[1:] if args is None else args)])


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host -> slots of a hostfile; None when there is no such file."""
    if not Path(hostfile_path).is_file():
        return None
    return {host.name: len(host.slots) for host in read_hostfile(hostfile_path)}


def report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> int:
    """`ds env`."""
    del hide_operator_status, hide_errors_and_warnings
    return ds(["env"])


def cli_main() -> int:
    """The program `ds_report`."""
    return report()
