"""What surrounds the optimizer's step: the losses of the ranks are added up, and gradients that are sums become averages."""

from __future__ import annotations

import torch

from ds_comm import Group
from ds_engine.loss_total import LossAccumulator, Totals
from ds_engine.plan import Plan
from ds_zero import ShardedOptimizer

__all__ = ["divisor", "settle", "totals_after"]


def divisor(plan: Plan, requested: float, count: float | None, *, ranks: int, scaled: bool) -> float:
    """Return the divisor that averaged gradients still need.

    Args:
        requested: Divisor for the caller's own averaging; 1.0 is none. Not used where losses are sums.
        count: Total count of sum losses over all ranks; None for mean losses.
        ranks: Number of ranks over which gradients were averaged.
        scaled: Whether losses went through the engine, which divides them by `plan.predivide`.
    """
    result = requested
    if count is not None:
        # Gradients are divided by microbatches and ranks so far.
        result = (count or 1.0) / (plan.batch.accumulation * ranks)
    elif plan.sums:
        result = 1.0 / ranks
    return result / plan.predivide if scaled else result


def settle(
    ledger: LossAccumulator, optimizer: ShardedOptimizer, plan: Plan, group: Group, device: torch.device
) -> Totals | None:
    """Reduce the losses over `group` before the update, and set the optimizer's divisor. Collective.

    Only the count of sum losses is needed before the update. Mean losses in host memory travel with the optimizer's own
    all-reduce in
    the update; `totals_after` then has them.

    Returns: The totals of the step; None where they come with the update, or where no loss was noted.
    """
    scaled = bool(ledger.losses)
    later = device.type == "cpu" and ledger.waits and optimizer.sharding.group.ranks == group.ranks
    totals, optimizer.extra = (None, ledger.leave()) if later else (ledger.close(group), ())
    count = None if totals is None else totals.count
    optimizer.divisor = divisor(plan, optimizer.divisor, count, ranks=group.size, scaled=scaled)
    return totals


def totals_after(optimizer: ShardedOptimizer, before: Totals | None) -> Totals | None:
    """Return the totals of a step after its update: those that the update reduced, or those known before."""
    report = optimizer.last
    return Totals.of(*report.extra) if report is not None and report.extra else before
