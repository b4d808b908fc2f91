"""A batch that cannot be computed is halved until what fails stands alone: one request's fault ends that request, not the engine.

What is computed twice is the same twice: keys and values go to the same slots. The caller's `compute` sees to what is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ds_inference.requests import ScheduledChunk

__all__ = ["compute_apart"]

T = TypeVar("T")


def compute_apart(
    chunks: Sequence[ScheduledChunk],
    compute: Callable[[Sequence[ScheduledChunk], bool], T],
    probe: Callable[[], object],
) -> tuple[list[T], dict[int, Exception]]:
    """Compute a step's chunks together; if that raises, in halves, and the halves' halves.

    Args:
        compute: Of some chunks, and whether some of them were tried before.
        probe: Computes something that asks nothing of any request; it raises where nothing can be computed any more.
    Returns: What `compute` gave, and for every request that fails alone, why.
    Raises:
        Exception: no chunk can be computed, and `probe` fails, too: the engine is broken. The error is that of the first attempt.
    Cost: where one of N chunks fails, about 2 log2 N more forwards.
    """
    results: list[T] = []
    failures: dict[int, Exception] = {}
    errors: list[Exception] = []
    # Not by recursion: a function that refers to itself keeps the results until the garbage collector comes.
    waiting = [(chunks, False)]
    while waiting:
        some, again = waiting.pop()
        try:
            results.append(compute(some, again))
        except Exception as error:
            errors.append(error)
            middle = len(some) // 2
            if middle:
                waiting += [(some[middle:], True), (some[:middle], True)]
            else:
                failures[some[0].request] = error
    if failures and not results:
        try:
            probe()
        except Exception:
            raise errors[0] from None
    return results, failures
