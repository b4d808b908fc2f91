"""Which units go into one message: neighbours in the order of reductions, of one seat, up to a limit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ds_engine.compiling.joint import buckets_of


@dataclass(frozen=True)
class Member:
    groups: Any
    joins: bool = True


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("ab"), st.booleans()), max_size=12), st.integers(1, 20))
def test_buckets_are_neighbours_of_one_seat_within_the_limit(units: list[tuple[int, str, bool]], limit: int) -> None:
    members = [Member(group_set, joins) for _, group_set, joins in units]
    numels = [numel for numel, _, _ in units]
    sequence = list(reversed(range(len(units))))
    buckets = buckets_of(sequence, members, numels, limit)  # type: ignore[arg-type]
    placed = [number for bucket in buckets for number in bucket]
    assert placed == sorted(placed, reverse=True)
    for bucket in buckets:
        assert list(bucket) == list(range(bucket[0], bucket[0] - len(bucket), -1))
        assert len(bucket) > 1
        assert sum(numels[n] for n in bucket) <= limit
        assert len({members[n].groups for n in bucket}) == 1
        assert all(members[n].joins for n in bucket)
    # No two neighbours are apart that would fit together.
    for one, other in itertools.pairwise(sequence):
        both = [next((b for b in buckets if n in b), (n,)) for n in (one, other)]
        if both[0] == both[1] or not (members[one].joins and members[other].joins):
            continue
        if members[one].groups == members[other].groups:
            assert sum(numels[n] for n in both[0]) + numels[other] > limit


def test_a_large_unit_goes_alone_and_what_is_left_together() -> None:
    members = [Member("a")] * 5
    assert buckets_of([4, 3, 2, 1, 0], members, [3, 3, 50, 3, 3], 10) == [(4, 3), (1, 0)]  # type: ignore[arg-type]
    assert buckets_of([], members, [], 10) == []
