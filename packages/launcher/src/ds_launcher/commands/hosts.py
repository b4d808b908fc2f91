"""`ds hosts`: show which hosts and slots a hostfile and filters come to."""

from __future__ import annotations

import argparse
import json
import os
import socket
from itertools import accumulate

from ds_launcher.devices import find_devices
from ds_launcher.inventory import Host, from_slurm, limit, read_hostfile, select

__all__ = ["HELP", "main", "register"]

HELP = "show the hosts and slots that a hostfile and filters come to"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--hostfile",
        "-H",
        default="",
        metavar="FILE",
        help="lines `host slots=n` (default: Slurm's allocation, or this host)",
    )
    parser.add_argument("--include", "-i", default="", metavar="FILTER", help="only these: host1@host2:0,2")
    parser.add_argument("--exclude", "-e", default="", metavar="FILTER", help="all but these")
    parser.add_argument("--nnodes", "--num_nodes", type=int, default=-1, metavar="N", help="the first N hosts")
    parser.add_argument("--nproc", "--num_gpus", type=int, default=-1, metavar="N", help="slots 0..N-1 of each")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print one line per host: its slots and the global ranks they get.

    Raises:
        ConfigError: the hostfile or a filter is wrong.
    """
    slots = max(1, len(find_devices(os.environ).visible))
    if args.hostfile:
        inventory = read_hostfile(args.hostfile)
    else:
        inventory = from_slurm(os.environ, slots) or (Host(socket.gethostname(), tuple(range(slots))),)
    inventory = limit(select(inventory, args.include, args.exclude), args.nnodes, args.nproc)
    if args.json:
        first = accumulate((len(host.slots) for host in inventory), initial=0)
        rows = [
            {"host": h.name, "slots": h.slots, "first_rank": rank} for h, rank in zip(inventory, first, strict=False)
        ]
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(host.name) for host in inventory)
    rank = 0
    for host in inventory:
        print(f"{host.name:{width}}  slots {','.join(map(str, host.slots))}  ranks {rank}-{rank + len(host.slots) - 1}")
        rank += len(host.slots)
    print(f"{len(inventory)} hosts, {rank} ranks")
    return 0


if __name__ == "__main__":
    import sys

    from ds_config.ds_command import main as ds

    sys.exit(ds(["hosts", *sys.argv[1:]]))
