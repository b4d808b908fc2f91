"""`ds run`'s side of the keeper: start it, pass signals on, wait, clean up if it was killed."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

from ds_launcher.child import HANDLED
from ds_launcher.failures import exit_status, explain
from ds_launcher.launch_plan import LaunchPlan
from ds_launcher.link import send_launch
from ds_launcher.procfs import USER_SIGNALS, adopt_orphans, kill_descendants

__all__ = ["supervise"]


class _Link:
    """The socket to the keeper; signals that come before the launch is written wait for it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._early: list[int] | None = []

    def start(self, launch: LaunchPlan) -> None:
        """Send the launch and what waited."""
        with contextlib.suppress(BrokenPipeError):  # the keeper was killed already; its exit code says so
            send_launch(self._control, launch)
            early, self._early = [number for number in self._early or () if number not in USER_SIGNALS], None
            self._control.sendall(bytes(early))

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self._early is not None:
            self._early.append(number)
            return
        with contextlib.suppress(OSError):
            self._control.send(bytes([number]))


def supervise(launch: LaunchPlan) -> int:
    """Run the launch to its end; return the exit status for the shell. Signals are handled meanwhile; main thread only."""
    adopt_orphans()
    ours, keeper_end = socket.socketpair()
    link = _Link(ours)
    with ours, _handling(link):
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "ds_launcher.keeper", str(keeper_end.fileno()), _blank(launch)],
            pass_fds=[keeper_end.fileno()],
            start_new_session=True,
        )
        keeper_end.close()
        link.start(launch)
        code = keeper.wait()
        if code < 0:
            left = kill_descendants(timeout_s=5.0)
            sys.stderr.write(f"ds run: the keeper process was ended ({explain(code)}); every rank was killed\n")
            if left:
                sys.stderr.write(f"ds run: could not be killed: process {', '.join(map(str, left))}\n")
    return exit_status(code)


def _blank(launch: LaunchPlan) -> str:
    """Return blanks that reserve room in the keeper's command line for those of its forked ranks."""
    longest = max((sum(len(word) + 1 for word in p.argv) for p in launch.processes if p.fork), default=0)
    return " " * min(longest, 32_000)


@contextlib.contextmanager
def _handling(link: _Link) -> Iterator[None]:
    """Forward signals to the keeper, while inside. Ignored signals (`nohup`) stay ignored."""
    before = {number: signal.getsignal(number) for number in (*HANDLED, *USER_SIGNALS)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, link.pass_on)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
