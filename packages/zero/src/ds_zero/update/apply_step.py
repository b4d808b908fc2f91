"""One update of a model, decided: early updates that hold stay, all others are made now, and new values go where gathers send them from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ds_zero.runtime.unit import Unit
from ds_zero.update.optimizer_state import OptimizerState
from ds_zero.update.overlapped_update import Ahead
from ds_zero.update.wrapped_optimizer import Updater

__all__ = ["Due", "apply"]


@dataclass(frozen=True, slots=True)
class Due:
    """What a step is to do.

    Attributes:
        units: Those that are trained, in canonical order.
        factor: Gradients are multiplied by it, after the weight of their unit.
        weights: Of each unit what its sums are multiplied by first.
        unused: Of each unit the numbers of parameters that no rank used.
    """

    units: Sequence[Unit]
    factor: float
    weights: Mapping[Unit, float]
    unused: Sequence[set[int]]


def apply(due: Due, state: OptimizerState, ahead: Ahead, updater: Updater) -> None:
    """Update all units. Gradients are used up, and stay for who clears them."""
    for unit in [unit for unit in due.units if unit.state_store.parked is not None]:
        unit.state_store.fetch_state()  # policies of updates read it before any unit is updated
    state.sharding.adopt_edits()
    factor = due.factor
    grads = [(unit, grad) for unit in due.units for grad in unit.gradients.sums or ()]
    first = any((grad.dtype, grad.device) != (unit.shard.dtype, unit.shard.device) for unit, grad in grads)
    early = ahead.settle(factor, first=first)
    done = set(early)
    grads = [(unit, grad) for unit, grad in grads if unit not in done]
    for unit in dict.fromkeys(unit for unit, _ in grads):
        unit.gradients.scale(due.weights[unit])
        if first:  # before it is cast: a loss scale may be more than the other format holds
            unit.gradients.scale(factor)
    if first:
        factor = 1.0
    gone = {unit: absent for unit, absent in zip(due.units, due.unused, strict=True) if unit not in done}
    for unit, absent in gone.items():
        if absent and len(absent) < len(unit.params) and unit.gradients.has_sums:
            state.split(unit)
    updater.begin(due.units)
    publish(early)
    together = [u for u in gone if not u.state_store.alone]
    batches = [together, *([u] for u in gone if u.state_store.alone)]
    for batch, after in zip(batches, [*batches[1:], []], strict=True):
        _update({unit: gone[unit] for unit in batch}, after, factor, updater)
    updater.finish()


def _update(units: Mapping[Unit, set[int]], after: Sequence[Unit], factor: float, updater: Updater) -> None:
    """Update units, of which some parameters were used by nobody, in one call of the optimizer; see `tiers.py`."""
    if not units:
        return
    for unit, absent in units.items():
        unit.state_store.fetch_state()
        for part in unit.parts:
            grad = unit.gradients.view(part.start, part.stop)
            if grad is not None and (not absent.issuperset(part.members) or not absent):
                part.tensor.grad = unit.state_store.gradient(grad, part.tensor)
    for unit in after:
        unit.state_store.begin_fetch()
    updater.update(units, factor)
    for unit in units:
        for part in unit.parts:
            part.tensor.grad = None
    publish(units)


def publish(units: Collection[Unit]) -> None:
    """Publish the new values of the units' shards and store them to their offload target."""
    for unit in units:
        unit.mark_updated()
        unit.state_store.store()
