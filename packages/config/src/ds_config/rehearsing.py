"""Whether this process rehearses: it is one rank of a world that is not there, and nothing that it computes is a result.

`ds_comm.rehearsal.start_rehearsal` sets it; whoever writes files that outlive the process asks it, and marks them.
"""

from __future__ import annotations

__all__ = ["REHEARSAL_MARK", "is_rehearsal", "set_rehearsal"]

REHEARSAL_MARK = "rehearsal"
"""The key under which files say that a rehearsal wrote them."""

_rehearsing = [False]


def is_rehearsal() -> bool:
    """Return whether this process is a rank of a world that is not there."""
    return _rehearsing[0]


def set_rehearsal(rehearsing: bool) -> None:
    """Set what `is_rehearsal` returns."""
    _rehearsing[0] = rehearsing
