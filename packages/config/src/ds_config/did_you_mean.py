"""Which known name did the user mean? Pure functions over strings.

The distance is optimal string alignment (insert, delete, replace, swap neighbours, each costs 1; Damerau 1964 with no
substring edited twice), computed after case is folded. Names that differ only in case, underscores or hyphens are distance 0.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["distance", "nearest"]


def distance(a: str, b: str, limit: int = 1 << 30) -> int:
    """Return the optimal string alignment distance between `a` and `b`, or `limit + 1` when it is above `limit`.

    Cost: len(a) * len(b) steps; less when `limit` is small.
    """
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, char in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (char != other))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
        before, last = last, row
    return min(last[-1], limit + 1)


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _shared_ends(a: str, b: str) -> int:
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = next((i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b)))
    return head + tail


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return up to `count` names of `known` that `name` may have meant, best first; empty when nothing is close.

    Close means: at most a third of the letters (and at least one) edited; or, after every closer one, all words of the
    name (split at underscores) found in the known name or the other way round (`batch_size` -> `train_batch_size`).
    Ties go to the name that shares more letters at both ends, then to the alphabet.
    """
    wanted, folded = _plain(name), name.casefold()
    words = {word for word in folded.replace("-", "_").split("_") if word}
    ranked: list[tuple[int, int, int, str]] = []
    for candidate in set(known):
        plain, other = _plain(candidate), candidate.casefold()
        if not plain or candidate == name:
            continue
        limit = max(1, max(len(wanted), len(plain)) // 3)
        # The underscored form counts real edits; the plain form ignores where underscores are.
        edits = 0 if wanted == plain else min(distance(wanted, plain, limit), distance(folded, other, limit))
        if edits <= limit and edits < len(plain):
            ranked.append((0, edits, -_shared_ends(folded, other), candidate))
        elif words and _contains(words, set(other.split("_"))):
            ranked.append((1, abs(len(other) - len(folded)), 0, candidate))
    return [entry[-1] for entry in sorted(ranked)[:count]]


def _contains(a: set[str], b: set[str]) -> bool:
    small, large = sorted((a, b), key=len)
    return small <= large and sum(map(len, small)) >= 4
