"""Ranks whose data do not end together: what the others do is a policy, agreed before every step, so that no rank waits for one that has ended.

The engine's own loader always gives every rank as many microbatches. Iterators of the caller may not: files of unequal length,
filtered samples, packed sequences.

    batches = even(my_batches, engine.mesh["data"], "fill", together=engine.plan.batch.accumulation)
    try:
        while True:
            engine.train_batch(batches)
    except StopIteration:
        pass

stop   The data end for all when they end for one; what the others have left is dropped.
fill   A rank without data repeats its last microbatch, which counts nothing, until all are at their end. Every microbatch that
       is real weighs the same (mean losses), or by its count (sum losses), on whatever rank.
error  An error on all ranks that names those whose data ended.

What is left at the end and is no whole step is dropped, except with "fill".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ds_comm import Group, all_reduce
from ds_comm.metadata import metadata_device
from ds_config.errors import PlanError
from ds_engine.loss_total import SumLoss

__all__ = ["Policy", "WeightedBatch", "even_batches"]

Policy = Literal["stop", "fill", "error"]


@dataclass(frozen=True, slots=True)
class WeightedBatch:
    """A microbatch and whether it counts; what `even_batches(policy="fill")` yields. `train_batch` and `eval_batch` understand it.

    Attributes:
        batch: What the model is called with.
        counts: False where it only stands in for data that are not there.
    """

    batch: Any
    counts: bool

    def weigh(self, loss: Tensor | SumLoss) -> SumLoss:
        """Scale the loss of `batch` to its share of the step's: a mean has count 1; padding batches count 0."""
        loss_sum = loss if isinstance(loss, SumLoss) else SumLoss(loss, 1.0)
        if self.counts:
            return loss_sum
        never = torch.zeros_like(loss_sum.total, dtype=torch.bool)
        return SumLoss(torch.where(never, loss_sum.total, 0.0), 0.0)  # with its graph: backward runs on every rank


def even_batches(batches: Iterable[Any], group: Group, policy: Policy = "stop", *, together: int = 1) -> Iterator[Any]:
    """Yield `batches` such that every rank of `group` gets the same number of microbatches.

    Args:
        batches: This rank's microbatches.
        group: The data-parallel ranks, `engine.mesh["data"]`.
        policy: See above. With "fill" every item is a `WeightedBatch`.
        together: How many are taken at once, those of a step: the data never end within one.
    Raises:
        PlanError: on all ranks: data ended on some ("data-uneven"), or some have none at all to fill with ("data-none").
    Collective at every `all_or_nothing`-th item: one all-reduce of 8 bytes a rank. Reads `all_or_nothing` microbatches ahead.
    """
    source, last = iter(batches), None
    while True:
        step_batches = list(islice(source, together))
        last = step_batches[-1] if step_batches else last
        counts = _counts(len(step_batches), last is not None, group)
        if max(counts) <= 0:
            return
        _check(counts, policy)
        if policy == "fill":
            yield from (WeightedBatch(batch, counts=True) for batch in step_batches)
            yield from (WeightedBatch(last, counts=False) for _ in range(together - len(step_batches)))
        elif min(counts) == together:
            yield from step_batches
        else:
            return


def _check(counts: list[int], policy: Policy) -> None:
    if policy == "error" and len(set(counts)) > 1:
        ended = ", ".join(f"rank {rank}" for rank, n in enumerate(counts) if n < max(counts))
        raise PlanError(
            f"the data of {ended} ended, others have more: {counts} microbatches by rank",
            code="data-uneven",
            fix='Give every rank as many microbatches, or use the policy "stop" or "fill".',
        )
    if policy == "fill" and min(counts) < 0:
        raise PlanError(
            f"some ranks have no data at all: {counts} microbatches by rank, -1 where there never was one",
            code="data-none",
            fix="Give every rank at least one microbatch, or start fewer ranks.",
        )


def _counts(count: int, ever: bool, group: Group) -> list[int]:
    """Exchange how many microbatches each rank has now; -1 for a rank that never had any."""
    counts = torch.zeros(group.size, dtype=torch.int64, device=metadata_device(group))
    counts[group.rank] = count if ever else -1
    all_reduce(counts, group=group, unit="data")
    numbers: list[int] = counts.tolist()
    return numbers
