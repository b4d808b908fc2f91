"""The other ranks of this host, whose rings stay readable when they die."""

from __future__ import annotations

from pathlib import Path

from ds_comm.watch.stamp_ring import RingReader, Stamp

__all__ = ["Peer", "open_peer"]


def open_peer(pid: int, fd: int) -> Peer | None:
    """Open the peer process whose ring is its file descriptor `fd`; return None when that fails."""
    try:
        return Peer(pid, RingReader(pid, fd))
    except OSError:  # another container, another user, or it died before we came
        return None


class Peer:
    """A process of this host."""

    def __init__(self, pid: int, ring: RingReader) -> None:
        self.pid, self._ring = pid, ring

    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in "ZX"

    def end(self) -> str:
        """Return how the peer process ended, as far as its ring says."""
        return self._ring.goodbye() or f"its process {self.pid} died without a word"

    def stamps(self) -> list[Stamp]:
        """Return the peer's last operations, oldest first."""
        return self._ring.stamps()

    def close(self) -> None:
        self._ring.close()
