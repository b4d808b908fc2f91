"""The other ranks of this host, whose rings stay readable when they die."""

from __future__ import annotations

import errno
from pathlib import Path

from ds_comm.watch.stamp_ring import RingReader, Stamp

__all__ = ["Peer", "open_peer"]

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say something of this process, and nothing of the one it looks at."""


def open_peer(pid: int, fd: int) -> Peer | None:
    """Open the peer process whose ring is its file descriptor `fd`; return None when the peer cannot be reached from here.

    Raises:
        OSError: this process has no file descriptor or no memory left; a later try may succeed.
    """
    try:
        return Peer(pid, RingReader(pid, fd))
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        return None  # another container, another user, or it died before we came


class Peer:
    """A process of this host."""

    def __init__(self, pid: int, ring: RingReader) -> None:
        self.pid, self._ring = pid, ring

    def alive(self) -> bool:
        """Whether it runs; a zombie does not. Only what the system says of the process is its death.

        This rank may be the one that cannot look (no file descriptor is left, no memory): then nothing is known of the peer.
        """
        return self._state() not in "ZX"

    def stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP): it does nothing until another lets it go on."""
        return self._state() == "T"

    def _state(self) -> str:
        """Return the letter of the process's state, as in /proc: X where there is no such process, ? where nothing is known."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "X"
        except OSError:
            return "?"
        return status.rpartition(")")[2].split()[0]

    def end(self) -> str:
        """Return how the peer process ended, as far as its ring says."""
        return self._ring.goodbye() or f"its process {self.pid} died without a word"

    def stamps(self) -> list[Stamp]:
        """Return the peer's last operations, oldest first."""
        return self._ring.stamps()

    def close(self) -> None:
        self._ring.close()
