"""Which spans of different ranks are one collective, and who let the others wait. Pure.

Ranks meet in a collective: it ends for all at about the time at which the last of them comes. How long a rank waits in it says when
the others came, not how fast it is itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_monitor.tracing.trace_reader import Rank, Span

__all__ = ["Collective", "Lateness", "lateness", "match", "offsets", "straggler"]

# All ranks are in these until the last one has come. A broadcast's root, for one, may leave before.
_MEETING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier", "all_to_all", "alltoall")
_CLOCKS_S = 0.005
"""Ends of a collective that are nearer than this say nothing of clocks."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: its name, its group and place in the group's order, and its span on each rank."""

    name: str
    group: str
    place: int
    spans: Mapping[int, Span]

    @property
    def meeting(self) -> bool:
        """Whether nobody leaves before everybody has come."""
        return any(word in self.name for word in _MEETING)


@dataclass(frozen=True, slots=True)
class Lateness:
    """How often a rank was the last one to come, and the seconds for which it alone was waited for."""

    rank: int
    times_last: int
    seconds: float


def match(ranks: Sequence[Rank]) -> tuple[Collective, ...]:
    """Match the collectives that at least two ranks recorded, in order of their start.

    A collective whose name differs between ranks is left out.
    """
    by_place: dict[tuple[str, int], dict[int, Span]] = {}
    for rank in ranks:
        for span in rank.spans:
            if span.group:
                by_place.setdefault((span.group, span.place), {})[rank.rank] = span
    collectives = [
        Collective(next(iter(spans.values())).name, group, place, spans)
        for (group, place), spans in by_place.items()
        if len(spans) > 1 and len({span.name for span in spans.values()}) == 1
    ]
    return tuple(sorted(collectives, key=lambda c: min(span.began_s for span in c.spans.values())))


def offsets(collectives: Sequence[Collective]) -> dict[int, float]:
    """Estimate by how many seconds each rank's clock is ahead of the median, for ranks with a visible difference.

    Clocks of different hosts differ.
    """
    ahead: dict[int, list[float]] = {}
    for collective in collectives:
        if collective.meeting:
            middle = statistics.median(span.ended_s for span in collective.spans.values())
            for rank, span in collective.spans.items():
                ahead.setdefault(rank, []).append(span.ended_s - middle)
    medians = {rank: statistics.median(values) for rank, values in ahead.items()}
    return {rank: value for rank, value in medians.items() if abs(value) > _CLOCKS_S}


def lateness(collectives: Sequence[Collective], clocks: Mapping[int, float] | None = None) -> tuple[Lateness, ...]:
    """Compute how long other ranks waited for each rank, the longest first.

    Args:
        clocks: The result of `offsets`.
    """
    ahead = clocks or {}
    last: dict[int, list[float]] = {}
    for collective in collectives:
        for rank in collective.spans:
            last.setdefault(rank, [])
        if collective.meeting:
            came = sorted((span.began_s - ahead.get(rank, 0.0), rank) for rank, span in collective.spans.items())
            last[came[-1][1]].append(came[-1][0] - came[-2][0])
    totals = [Lateness(rank, len(waits), sum(waits)) for rank, waits in last.items()]
    return tuple(sorted(totals, key=lambda item: (-item.seconds, item.rank)))


def straggler(late: Sequence[Lateness], seconds: float) -> Lateness | None:
    """Return the straggler, or None if no rank stands out.

    A straggler delays other ranks for at least a hundredth of the run's `seconds`, and twice as long as any other rank.
    """
    if len(late) < 2 or late[0].seconds < 0.01 * seconds or late[0].seconds < 2 * late[1].seconds:
        return None
    return late[0]
