"""What a collective moved per second, as nccl-tests defines it, with the size of the group that ran it.

*Algorithmic* bandwidth is message bytes over time, what a user sees. *Bus* bandwidth is that times the share of the
message that has to cross a link with any algorithm, so that one number can be compared with the hardware for every
operation and number of ranks. The message is the whole tensor: what all ranks end with (all_gather) or begin with
(reduce_scatter), not one rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bandwidth", "bandwidth", "message_bytes"]

_FAMILY = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather": "gathered",
    "all_gather_single": "gathered",
    "all_gather_coalesced": "gathered",
    "reduce_scatter": "scattered",
    "reduce_scatter_single": "scattered",
    "reduce_scatter_coalesced": "scattered",
    "all_to_all": "scattered",
    "all_to_all_single": "scattered",
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """In gigabits per second."""

    algorithm_gbps: float
    bus_gbps: float


def message_bytes(op: str, passed_bytes: int, ranks: int) -> int:
    """Return the bytes of the whole message, from the bytes that one rank passed in."""
    return passed_bytes * ranks if _FAMILY.get(op) == "gathered" else passed_bytes


def bandwidth(op: str, passed_bytes: int, ranks: int, seconds: float) -> Bandwidth:
    """Compute the bandwidths of an operation of `ranks` ranks to which this rank passed `passed_bytes`."""
    if seconds <= 0 or ranks < 1:
        return Bandwidth(0.0, 0.0)
    algorithm = message_bytes(op, passed_bytes, ranks) * 8 / seconds / 1e9
    share = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * share, "gathered": share, "scattered": share}.get(_FAMILY.get(op, ""), 1.0)
    return Bandwidth(algorithm, algorithm * factor)
