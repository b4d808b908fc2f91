"""How much later than this rank the others come to an operation.

Ranks do the same work and need a little more or less time for it, so that each collective waits for the rank that is last at it. A rehearsal has one
rank only. Its own earlier steps show how uneven they are: each of the others takes one of these, drawn anew for every step, and computes
between two operations as long as this rank did there.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["PeerSkew"]

_REMEMBERED: Final = 16
"""Steps to draw from, and how many others at most are followed: no more of them can differ."""
_WARM_UP_STEPS: Final = 2
_PAUSE_S: Final = 0.02

Operation = tuple[str, int]
"""Name and bytes."""


@dataclass(slots=True)
class _Peer:
    """Another rank. `behind_s`: how much later than this rank it does what comes next; negative where it is ahead."""

    step: list[tuple[Operation, float]] = field(default_factory=list)
    behind_s: float = 0.0


class PeerSkew:
    """Follows the other ranks of a rehearsed world through the operations of this one.

    Only the thread that issues the first operation counts; what other threads issue is never late.

    Args:
        peers: Other ranks of the world.
        seed: Of the draws.
    """

    def __init__(self, peers: int, seed: int = 0) -> None:
        self._peers = [_Peer() for _ in range(min(peers, _REMEMBERED))]
        self._random = random.Random(seed)
        self._steps: deque[list[tuple[Operation, float]]] = deque(maxlen=_REMEMBERED)
        self._step: list[tuple[Operation, float]] = []
        self._ended = 0
        self._computed_s = 0.0
        self._since_s: float | None = None
        self._thread = 0

    def issue(self, operation: Operation, now_s: float) -> float:
        """Note that this rank issues an operation; return in how many seconds the last of the others does."""
        if self._since_s is None:
            self._thread = threading.get_ident()
        elif threading.get_ident() != self._thread:
            return 0.0
        computed_s = self._computed_s + now_s - (now_s if self._since_s is None else self._since_s)
        place = len(self._step)
        usual_s = statistics.median(self._at(place, operation) or [computed_s])
        if computed_s > 2 * usual_s + _PAUSE_S:  # data, a checkpoint, an evaluation: the others make the same pause
            computed_s = usual_s
        else:
            for peer in self._peers:
                if place < len(peer.step) and peer.step[place][0] == operation:
                    peer.behind_s += peer.step[place][1] - computed_s
        self._step.append((operation, computed_s))
        self._computed_s, self._since_s = 0.0, now_s
        return max([0.0, *(peer.behind_s for peer in self._peers)])

    def wait(self, began_s: float, ended_s: float, complete_s: float) -> None:
        """Note that this rank waited from `began_s` to `ended_s` for an operation that was complete at `complete_s`.

        No rank goes on before that, so whoever is ahead loses it, and whoever is behind gains what this rank waited.
        """
        if self._since_s is None or threading.get_ident() != self._thread:
            return
        self._computed_s += max(0.0, began_s - self._since_s)
        self._since_s = ended_s
        for peer in self._peers:
            peer.behind_s = max(began_s + peer.behind_s, complete_s) - max(began_s, complete_s)

    def end_step(self) -> None:
        """Begin another step: every other rank takes one of this rank's earlier steps."""
        self._ended += 1
        if self._ended > _WARM_UP_STEPS and self._step:
            self._steps.append(self._step)
        self._step = []
        for peer in self._peers:
            peer.step = self._random.choice(self._steps) if self._steps else []

    def _at(self, place: int, operation: Operation) -> list[float]:
        return [step[place][1] for step in self._steps if place < len(step) and step[place][0] == operation]
