"""What the losses of a step say about its update: what averaged gradients are multiplied and divided by, and the totals over the ranks."""

from __future__ import annotations

import torch

from ds_comm import Group
from ds_engine.loss_total import LossAccumulator, Totals
from ds_engine.plan import Plan
from ds_zero import ShardedOptimizer

__all__ = ["gain_of", "settle", "totals_after"]


def gain_of(plan: Plan, *, scaled: bool) -> float:
    """Return what averages over ranks are to be multiplied by.

    Args:
        scaled: Whether losses went through the engine, which divides them by `plan.predivide`.
    """
    return plan.summed * (plan.predivide if scaled else 1.0)


def settle(
    ledger: LossAccumulator, optimizer: ShardedOptimizer, plan: Plan, group: Group, device: torch.device
) -> Totals | None:
    """Reduce the losses over `group` before the update, and set what the optimizer divides by. Collective.

    Gradients of sum losses, divided by microbatches and ranks so far, are divided by their count, which is needed before the
    update. Mean losses in host memory travel with the optimizer's own all-reduce in the update; `totals_after` then has them.

    Returns:
        The totals of the step; None where they come with the update, or where no loss was noted.
    """
    optimizer.gain = gain_of(plan, scaled=bool(ledger.losses))
    later = device.type == "cpu" and ledger.waits and optimizer.sharding.group.ranks == group.ranks
    totals, optimizer.extra = (None, ledger.leave()) if later else (ledger.close(group), ())
    if totals is not None and totals.count is not None:
        averaged = plan.batch.accumulation * group.size // plan.summed
        optimizer.divisor = (totals.count or 1.0) / averaged
    return totals


def totals_after(optimizer: ShardedOptimizer, before: Totals | None) -> Totals | None:
    """Return the totals of a step after its update: those that the update reduced, or those known before."""
    report = optimizer.last
    return Totals.of(*report.extra) if report is not None and report.extra else before
