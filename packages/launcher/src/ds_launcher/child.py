"""One process of a launch as the keeper holds it: started to die with the keeper, its output read in lines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO

from ds_launcher.exports import write_secrets
from ds_launcher.failures import Ending, starts_traceback
from ds_launcher.forked import Forks
from ds_launcher.launch_plan import Process
from ds_launcher.output import LineSplitter, Screen
from ds_launcher.procfs import USER_SIGNALS, die_with, open_pidfd

__all__ = ["HANDLED", "Child", "OutputStream", "before_exec", "start_child"]

# By name: Windows, which only gets as far as the message that it is not supported, has two of them.
HANDLED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
_TAIL_LINES, _TAIL_WIDTH = 400, 4096


class Forked:
    """A fork of this process, as the keeper uses a Popen."""

    stdin = None

    def __init__(self, pid: int, out: int | None, err: int) -> None:
        self.pid = pid
        self.stdout = None if out is None else os.fdopen(out, "rb", 0)
        self.stderr = os.fdopen(err, "rb", 0)
        self._code: int | None = None

    def wait(self) -> int:
        """Wait for the process and return its exit code; negative: the signal that ended the process."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def poll(self) -> int | None:
        """Return the exit code if the process has ended, else None."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


@dataclass(slots=True)
class Child:
    """A process while and after it runs. Until `code` is set it is not reaped, so its id means nobody else."""

    process: Process
    popen: subprocess.Popen[bytes] | Forked
    pidfd: int | None  # readable when it ended; None where the system has no such thing
    log: IO[bytes] | None
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))  # of its standard error
    traceback_s: float | None = None
    stop_requested: bool = False
    stands_since_s: float | None = None  # a signal has stopped it; inf: that was told
    code: int | None = None
    ended_s: float = 0.0

    @property
    def running(self) -> bool:
        """Whether it has not ended, or nobody noticed yet."""
        return self.code is None

    def ending(self, index: int) -> Ending:
        """Return how the process ended, for the failure analysis. Call only after the process has ended."""
        return Ending(index, self.code or 0, self.ended_s, self.traceback_s, self.stop_requested)

    def reap(self) -> None:
        """Note how it ended; it has."""
        self.code, self.ended_s = self.popen.wait(), time.monotonic()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class OutputStream:
    """One output of one child, on its way to the screen, the log file and the tail.

    Args:
        name: `out` or `err`.
        pipe: the reading end.
        raw: show bytes as they come instead of whole lines (the one plain process on a terminal: its bars move).
    """

    def __init__(self, child: Child, name: str, pipe: IO[bytes], *, raw: bool) -> None:
        self._child, self._name, self.pipe, self._raw = child, name, pipe, raw
        self._splitter = LineSplitter()
        os.set_blocking(pipe.fileno(), False)

    def read(self, screen: Screen) -> bool:
        """Pass on what there is. False when the stream has come to its end, and is closed."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        process = self._child.process
        if self._raw and data:
            screen.raw(self._name, data)
        for line in self._splitter.feed(data) if data else self._splitter.finish():
            self._keep(line, screen)
            if process.shown and not self._raw:
                # torch marks its tracebacks with the rank itself; once is enough.
                prefix = process.prefix.encode()
                screen.line(self._name, b"" if prefix and line.startswith(prefix.rstrip()) else prefix, line)
        if not data:
            self.pipe.close()
        return bool(data)

    def _keep(self, line: bytes, screen: Screen) -> None:
        if self._child.log is not None:
            try:
                self._child.log.write(line + b"\n")
            except OSError as error:  # a full disk under the log is no reason to end a job
                screen.line(
                    "err", b"ds run: ", f"no more lines in {self._child.process.log}: {error.strerror}".encode()
                )
                self._child.log = None
        if self._name == "err":
            self._child.tail.append(line[:_TAIL_WIDTH])
            if starts_traceback(line):
                self._child.traceback_s = time.monotonic()


def start_child(process: Process, screen: Screen, forks: Forks | None = None) -> tuple[Child, list[OutputStream]]:
    """Start it in a session of its own, to be killed when this process dies. No thread may exist yet.

    Args:
        forks: where it shall be a fork of this process.

    Raises:
        OSError: the command or its log file cannot be opened.
    """
    plain = process.shown and not process.prefix
    keeper = os.getpid()
    log = open(process.log, "ab", buffering=0) if process.log else None  # noqa: SIM115
    # A plain process keeps the terminal itself: colours, progress bars, the width.
    own_terminal = plain and log is None and screen.is_terminal("out")
    popen: subprocess.Popen[bytes] | Forked
    if forks is not None and forks.ready:
        popen = _fork(forks, process, piped=not own_terminal)
    else:
        popen = subprocess.Popen(
            process.argv,
            env={**os.environ, **process.env},
            stdin=_stdin(process.stdin),
            stdout=None if own_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: before_exec(keeper, process.cores),
        )
    if process.secrets and popen.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its exit code says why
            popen.stdin.write(write_secrets(process.secrets))
            popen.stdin.flush()
    child = Child(process, popen, open_pidfd(popen.pid), log)
    streams = [
        OutputStream(child, name, pipe, raw=plain and screen.is_terminal(name))
        for name, pipe in (("out", popen.stdout), ("err", popen.stderr))
        if pipe is not None
    ]
    return child, streams


def _fork(forks: Forks, process: Process, *, piped: bool) -> Forked:
    null = None if _stdin(process.stdin) is None else os.open(os.devnull, os.O_RDONLY)
    out, err = os.pipe() if piped else None, os.pipe()
    pid = forks.fork(process, (null, out[1] if out else None, err[1]), before_exec)
    for descriptor in (null, out[1] if out else None, err[1]):
        if descriptor is not None:
            os.close(descriptor)
    return Forked(pid, out[0] if out else None, err[0])


def _stdin(kind: str) -> int | None:
    if kind == "inherit" and sys.stdin is not None and not sys.stdin.isatty():
        return None
    return subprocess.PIPE if kind == "hold" else subprocess.DEVNULL


def before_exec(keeper: int, cores: tuple[int, ...]) -> None:
    """Prepare the new process: die with the keeper, bind to the cores, reset the signal handlers."""
    die_with(keeper)
    if cores:
        os.sched_setaffinity(0, cores)
    for number in (*HANDLED, *USER_SIGNALS):
        signal.signal(number, signal.SIG_DFL)  # the keeper ignores some, and exec would keep that
