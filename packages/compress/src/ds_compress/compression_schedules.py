"""When techniques act: integers in, integers out.

Words: *steps* are updates applied so far; a technique with offset n acts from the forward after step n on, that is with steps >= n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Bits", "dense_share", "fall", "mixed_ratio", "new_mask_at", "starts"]


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of a weight at one time.

    Attributes:
        bits: Now.
        due: The count of steps since the offset at which the next one falls.
        since: The count at which the last one fell.
    """

    bits: int
    due: int
    since: int = 0


def starts(steps: int, offset: int) -> bool:
    """Whether a technique acts."""
    return steps >= offset


def fall(now: Bits, count: int, target: int, factor: int = 1) -> Bits:
    """Return the bits at `count` steps since the offset: a bit falls when its period ends; the period then doubles.

    Args:
        now: The current state; `Bits(start_bits, period)` at first.
        target: Fewest bits.
        factor: Periods that begin are this many times longer: 1 + floor(4 * eigenvalue) in MoQ.
    """
    while now.bits > target and count >= now.due:
        now = replace(now, bits=now.bits - 1, since=now.due, due=now.due * 2 * factor)
    return now


def mixed_ratio(now: Bits, count: int, change: float) -> float:
    """Return the ratio of the unquantized weight in forward: 1 when a bit fell, then less by `change` each step."""
    return max(0.0, 1.0 - change * max(0, count - now.since))


def dense_share(steps: int, offset: int, end: int, target: float) -> float:
    """Return the ratio of weights that iterative pruning does not prune at a step.

    1 before `offset`, `target` from `end` on, falling exponentially between them.
    """
    if steps < offset:
        return 1.0
    if steps >= end:
        return target
    return float(target ** ((steps - offset) / (end - offset)))


def new_mask_at(steps: int, offset: int, end: int, stride: int) -> bool:
    """Whether iterative pruning makes a new mask after so many steps; the last one at `end`."""
    return offset <= steps <= end and ((steps - offset) % stride == 0 or steps == end)
