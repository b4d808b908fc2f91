"""What travels from `ds run` to its keeper: the launch, then one byte per signal. Closing it means "I am gone"."""

from __future__ import annotations

import os
import socket

from ds_launcher.launch_plan import LaunchPlan, from_json, to_json

__all__ = ["receive_launch", "send_launch"]


def send_launch(control: socket.socket, launch: LaunchPlan) -> None:
    """Write the launch, after its length in 8 bytes."""
    data = os.fsencode(to_json(launch))
    control.sendall(len(data).to_bytes(8, "big") + data)


def receive_launch(control: socket.socket) -> LaunchPlan:
    """Read what `send_launch` wrote.

    Raises:
        EOFError: the other end is gone.
    """
    size = int.from_bytes(_exactly(control, 8), "big")
    return from_json(os.fsdecode(_exactly(control, size)))


def _exactly(control: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            raise EOFError("the launcher ended before it said what to launch")
        data += more
    return data
