"""What surrounds the optimizer's step: the losses of the ranks are added up, and gradients that are sums become averages."""

from __future__ import annotations

import torch

from ds_comm import Group
from ds_engine.loss_total import LossAccumulator, Totals
from ds_engine.plan import Plan
from ds_zero import ShardedOptimizer

__all__ = ["divisor", "settle", "totals_after"]


def divisor(plan: Plan, given: float, count: float | None, *, ranks: int, scaled: bool) -> float:
    """What averaged gradients are still divided by.

    Args:
        given: What the caller's own averaging asks for; 1.0 is nothing. Not used where losses are sums.
        count: What sum losses are divided by, over all ranks; None for mean losses.
        ranks: Over which gradients were averaged.
        scaled: Whether losses went through the engine, which divides them by `plan.predivide`.
    """
    found = given
    if count is not None:
        # Gradients are divided by microbatches and ranks so far.
        found = (count or 1.0) / (plan.batch.accumulation * ranks)
    elif plan.sums:
        found = 1.0 / ranks
    return found / plan.predivide if scaled else found


def settle(
    ledger: LossAccumulator, optimizer: ShardedOptimizer, plan: Plan, group: Group, device: torch.device
) -> Totals | None:
    """Before the update: add up the losses over `group`, and set the optimizer's divisor. Collective.

    Only the count of sum losses is needed before the update. Mean losses in host memory go with what the optimizer's ranks tell each
    other in it; `totals_after` then has them.

    Returns: The totals of the step; None where they come with the update, or where no loss was noted.
    """
    scaled = bool(ledger.losses)
    later = device.type == "cpu" and ledger.waits and optimizer.sharding.group.ranks == group.ranks
    totals, optimizer.extra = (None, ledger.leave()) if later else (ledger.close(group), ())
    count = None if totals is None else totals.count
    optimizer.divisor = divisor(plan, optimizer.divisor, count, ranks=group.size, scaled=scaled)
    return totals


def totals_after(optimizer: ShardedOptimizer, before: Totals | None) -> Totals | None:
    """The totals of a step whose update is done: those that the update gave, or those known before."""
    report = optimizer.last
    return Totals.of(*report.extra) if report is not None and report.extra else before
