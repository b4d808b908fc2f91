"""The output of many processes on one screen, in whole lines.

Reading must never wait for the screen: a keeper that is stuck in a full pipe cannot kill anybody. So a thread does the
writing, and when too much waits for it the processes are not read until it catches up (they wait, as they would alone).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import IO

__all__ = ["LineSplitter", "Screen"]

_LONGEST_LINE = 1 << 16
_MOST_WAITING = 1 << 22


class LineSplitter:
    """Bytes in, whole lines out (without their ends). A line of more than 64 KiB comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read; return the lines it completed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest[:_LONGEST_LINE])
            self._rest = self._rest[_LONGEST_LINE:]
        return lines

    def finish(self) -> list[bytes]:
        """Return the unfinished line, if any, at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Screen:
    """Standard output and standard error of the launcher, written by one thread.

    Args:
        files: by name, `out` and `err`, unbuffered use of their descriptors.
    """

    def __init__(self, files: dict[str, IO[bytes]]) -> None:
        self._fds = {name: file.fileno() for name, file in files.items()}
        self._terminal = {name: os.isatty(fd) for name, fd in self._fds.items()}
        self._queue: deque[tuple[str, bytes]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)

    def start(self) -> None:
        """Start the thread; after the last fork."""
        self._thread.start()

    def is_terminal(self, name: str) -> bool:
        """Whether `out` or `err` is a terminal."""
        return self._terminal[name]

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be read."""
        return self._waiting > _MOST_WAITING

    def line(self, name: str, prefix: bytes, text: bytes) -> None:
        """Show one line. On a terminal it first clears what a progress bar may have left there."""
        clear = b"\r\x1b[2K" if self._terminal[name] and prefix else b""
        self.raw(name, clear + prefix + text + b"\n")

    def raw(self, name: str, data: bytes) -> None:
        """Show bytes as they are."""
        with self._changed:
            self._queue.append((name, data))
            self._waiting += len(data)
            self._changed.notify()

    def finish(self, timeout_s: float) -> bool:
        """Announce the end of the output and wait up to `timeout_s` for pending writes. Whether all were written."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        closed: set[str] = set()
        while True:
            with self._changed:
                while not self._queue and not self._ended:
                    self._changed.wait()
                if not self._queue:
                    return
                name, data = self._queue.popleft()
            if name not in closed and (error := _write(self._fds[name], data)) is not None:
                closed.add(name)  # the job goes on unseen
                if not isinstance(error, BrokenPipeError):  # who left (`| head`) wants no more
                    lost = f"ds run: output of the job is lost from here on: {error.strerror}\n"
                    _write(self._fds["err"], lost.encode())
            with self._changed:
                self._waiting -= len(data)


def _write(fd: int, data: bytes) -> OSError | None:
    """Write all of `data`; return the error that kept some of it back."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        return error
    return None
