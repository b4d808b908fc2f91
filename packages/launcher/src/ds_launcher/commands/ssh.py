"""`ds ssh`: run one command on all hosts of a hostfile, side by side."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from ds_config.errors import ConfigError
from ds_launcher.inventory import read_hostfile, select

__all__ = ["HELP", "main", "register"]

HELP = "run one command on all hosts of a hostfile"
_SSH = ("ssh", "-o", "BatchMode=yes")  # a question for a password would wait for ever


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--hostfile", "-H", "-f", required=True, metavar="FILE", help="lines `host slots=n`")
    parser.add_argument("--include", "-i", default="", metavar="FILTER", help="only these: host1@host2")
    parser.add_argument("--exclude", "-e", default="", metavar="FILTER", help="all but these")
    parser.add_argument("--dry-run", action="store_true", help="show what would be started")
    parser.add_argument("--json", action="store_true", help="print JSON: a list, one object a host")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, in a login shell there")


def main(args: argparse.Namespace) -> int:
    """Run it everywhere, print the output host by host; the first exit status that is not 0.

    Raises:
        ConfigError: no command is given ("launch-options"), or the hostfile or a filter is wrong.
    """
    if not args.command:
        raise ConfigError("ds ssh was given no command", code="launch-options", fix="ds ssh -f HOSTFILE nvidia-smi")
    hosts = [host.name for host in select(read_hostfile(args.hostfile), args.include, args.exclude)]
    calls = [(*_SSH, host, " ".join(args.command)) for host in hosts]
    if args.dry_run:
        rows = [{"host": host, "argv": call} for host, call in zip(hosts, calls, strict=True)]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(map(shlex.join, calls)))
        return 0
    with ThreadPoolExecutor(len(calls)) as pool:
        ended = list(pool.map(_run, calls))
    if args.json:
        results = [
            {"host": host, "status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
            for host, done in zip(hosts, ended, strict=True)
        ]
        print(json.dumps(results, indent=1))
    for host, done in zip(hosts, ended, strict=True) if not args.json else ():
        for text, stream in ((done.stdout, sys.stdout), (done.stderr, sys.stderr)):
            for line in text.splitlines():
                print(f"{host}: {line}", file=stream)
    return next((done.returncode for done in ended if done.returncode), 0)


def _run(call: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, text=True)


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["ssh", *sys.argv[1:]]))
