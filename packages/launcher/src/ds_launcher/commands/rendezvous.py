"""`ds rendezvous`: where the hosts of elastic jobs meet, in a process that belongs to none of them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import socket
from typing import TYPE_CHECKING

from ds_config.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["HELP", "main", "register"]

HELP = "keep the rendezvous of jobs whose hosts come and go, so that each of these may be lost"
_ENDS = (signal.SIGINT, signal.SIGTERM)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--port", type=int, default=29400, help="where to listen (29400); 0: on one that is free")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        LaunchError: torch is not installed ("launch-torch"), or the port cannot be had ("launch-port").
    """
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(
            "the rendezvous is a store of torch, which is not installed",
            code="launch-torch",
            fix="Install it: pip install 'ds-launcher[elastic]'.",
        )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # before the store's threads: they are to take none
    try:
        store = _serve(args.port)
        endpoint = f"{socket.gethostname()}:{store.port}"
        line = (
            f"hosts meet here: ds run --rdzv-endpoint {endpoint} --run-id NAME --nnodes MIN:MAX --max-restarts N SCRIPT"
        )
        print(json.dumps({"endpoint": endpoint, "port": store.port}) if args.json else line, flush=True)
        signal.sigwait(_ENDS)
        del store
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _serve(port: int) -> TCPStore:
    from torch.distributed import DistError, TCPStore  # seconds, and `ds rendezvous --help` does without

    try:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"port {port} cannot be listened on: {str(error).splitlines()[0]}",
            code="launch-port",
            fix="Give another --port, or 0 for one that is free.",
        ) from error


if __name__ == "__main__":
    import sys

    from ds_config.ds_command import main as ds

    sys.exit(ds(["rendezvous", *sys.argv[1:]]))
