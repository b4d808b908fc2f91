"""Attention heads over ranks, for tensor and for sequence parallelism alike. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ds_config.errors import PlanError

__all__ = ["HeadCounts", "Stretch", "spread"]

Stretch = tuple[int, int]
"""`start <= i < stop` of a dim, in elements of the uncut tensor."""


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of one attention module, `key_value` dividing `query`.

    Attributes:
        query: Query heads.
        key_value: Key-value heads, equal to `query` without grouping.
    """

    query: int
    key_value: int

    def __post_init__(self) -> None:
        if self.key_value < 1 or self.query % self.key_value:
            raise PlanError(
                f"{self.query} query heads cannot share {self.key_value} key-value heads evenly",
                code="tensor-heads",
                fix="Check the model's head counts.",
            )

    def stretches(self, degree: int) -> tuple[tuple[Stretch, Stretch], ...]:
        """Return each rank's query heads and key-value heads; query heads stay with the key-value head they use.

        Up to as many ranks as key-value heads: whole groups per rank, where the first ranks get one more. With more
        ranks, a
        key-value head is replicated on several ranks, among which its query heads are divided.

        Raises:
            PlanError: a rank would have no query head ("tensor-heads").
        """
        group = self.query // self.key_value
        if degree <= self.key_value:
            return tuple(((a * group, b * group), (a, b)) for a, b in spread(self.key_value, degree))
        ranges: list[tuple[Stretch, Stretch]] = []
        for head, (first, last) in enumerate(spread(degree, self.key_value)):
            if last - first > group:
                raise PlanError(
                    f"{self.query} query heads cannot be given to {degree} ranks: each needs one at least, "
                    f"and each of the {self.key_value} key-value heads serves {group}",
                    code="tensor-heads",
                    fix=f"Use at most {self.query} ranks, of which each key-value head's share is at most {group}.",
                )
            for a, b in spread(group, last - first):
                ranges.append(((head * group + a, head * group + b), (head, head + 1)))
        return tuple(ranges)


def spread(units: int, over: int) -> tuple[Stretch, ...]:
    """Split `units` into `over` consecutive ranges, as evenly as possible; the first ranges have one more."""
    each, left = divmod(units, over)
    bounds = [index * each + min(index, left) for index in range(over + 1)]
    return tuple(pairwise(bounds))
