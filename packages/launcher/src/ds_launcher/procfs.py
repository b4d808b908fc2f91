"""Processes of this host: who descends from whom, and signals that reach the process they are meant for.

On Linux a process id may be given to another process as soon as its owner is reaped, so nothing here signals by number
alone: a pidfd is opened first, then the start time is compared, then the signal goes through the pidfd. Kernels before 5.3
have no pidfd; there the start time is compared right before the signal. Without /proc `descendants` finds nothing, and
the keeper falls back to process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "USER_SIGNALS",
    "Proc",
    "adopt_orphans",
    "descendants",
    "die_with",
    "kill_descendants",
    "open_pidfd",
    "send",
    "stopped",
]

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LINUX = sys.platform == "linux"
USER_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""What a scheduler warns with (Slurm's --signal) or a user asks with: ranks get them, and the job goes on."""
_prctl = ctypes.CDLL(None, use_errno=True).prctl if _LINUX else None


@dataclass(frozen=True, slots=True)
class Proc:
    """One process at one moment. `start` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    parent: int
    start: int
    state: str  # the letter of proc_pid_stat(5)

    @property
    def zombie(self) -> bool:
        """Whether it has ended."""
        return self.state in "ZX"


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant whose own parent dies. Whether the system can."""
    return _prctl is not None and _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the process `parent` dies. Survives exec.

    Called in a new child before exec.
    """
    if _prctl is None:
        return
    _prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + signal.SIGKILL)


def descendants(root: int) -> list[Proc]:
    """List every process below `root`, parents first, zombies included. Cost: one read per process of the host."""
    children: dict[int, list[Proc]] = {}
    for entry in Path("/proc").glob("[0-9]*") if _LINUX else ():
        proc = _read(int(entry.name))
        if proc is not None:
            children.setdefault(proc.parent, []).append(proc)
    processes: list[Proc] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        processes += below
        queue += [proc.pid for proc in below]
    return processes


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that always refers to this process and is readable after its end; None if unsupported.

    Raises:
        ProcessLookupError: no process has this id.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # not Linux; a kernel or a container that does not know the call
        return None


def send(proc: Proc, number: int) -> bool:
    """Signal exactly this process. False when it is gone."""
    with contextlib.ExitStack() as stack:
        try:
            handle = open_pidfd(proc.pid)
            if handle is not None:
                stack.callback(os.close, handle)
            now = _read(proc.pid)
            if now is None or now.start != proc.start:
                return False
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(proc.pid, number)
        except ProcessLookupError:
            return False
    return True


def stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP): it does nothing until another lets it go on."""
    proc = _read(pid)
    return proc is not None and proc.state == "T"


def kill_descendants(timeout_s: float) -> list[int]:
    """Kill everything below this process and reap it; return the ids that are still there after `timeout_s`.

    Run by a process that adopted its orphans: what is killed hands its children to us, so the loop ends with nobody left.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        alive = [proc for proc in descendants(os.getpid()) if not proc.zombie]
        for proc in alive:
            send(proc, signal.SIGKILL)
        _reap_all()
        if not alive or time.monotonic() > deadline_s:
            return [proc.pid for proc in alive]
        time.sleep(0.01)


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _read(pid: int) -> Proc | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # "pid (name) state ppid ..."; the name may hold spaces and brackets.
    fields = text[text.rindex(")") + 2 :].split()
    return Proc(pid, int(fields[1]), int(fields[19]), fields[0])
