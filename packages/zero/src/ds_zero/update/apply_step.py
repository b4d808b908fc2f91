"""One update of a model, decided: early updates that hold stay, all others are made now, and new values go where gathers send them from.

Units whose gradients are on the host are updated one after another, so that the new weights of one go back to the device while the next is
updated; all others by one call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ops.optim import FusedOps, OpsOptimizer
from ds_zero.runtime.attributes import GradAttributes
from ds_zero.runtime.unit import OptimizerSlice, Unit
from ds_zero.update.optimizer_state import OptimizerState
from ds_zero.update.overlapped_update import Ahead, scales_before_cast
from ds_zero.update.wrapped_optimizer import Updater

__all__ = ["Due", "apply", "due_of", "scale_in_place"]


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


def due_of(
    units: Sequence[Unit], factor_of: Callable[[Unit], float], average: float, clip: float, unused: Sequence[set[int]]
) -> Due:
    """Decide what the sums of each unit are multiplied by, and what all gradients are while they update.

    Args:
        factor_of: What the sums of a unit, as they are, are to be multiplied by to be averages.
        average: The same of sums that nobody has multiplied, in most units.
    """
    remaining = {unit: factor_of(unit) for unit in units}
    applied = any(unit.gradients.applied != 1.0 for unit in units)
    if applied and len(set(remaining.values())) == 1:  # such as 1: all of them are averages already
        return Due(units, remaining[units[0]] * clip, dict.fromkeys(units, 1.0), unused)
    return Due(units, average * clip, {unit: factor / average for unit, factor in remaining.items()}, unused)


def scale_in_place(
    units: Sequence[Unit],
    clip: float,
    factor_of: Callable[[Unit], float],
    attributes: GradAttributes,
    updater: Updater,
) -> bool:
    """Make gradients that stay after the step what `param.grad` shows: clipped, and averaged if the optimizer takes no factor.

    Returns whether the optimizer's step will leave averages in their memory.
    """
    for unit in units if clip != 1.0 else ():
        attributes.multiply(unit, clip)
    if isinstance(updater.inner, OpsOptimizer):
        return False
    remaining = {factor_of(unit) for unit in units}
    if len(remaining) == 1 and updater.leaves_scaled(units, *remaining):
        return True
    for unit in units:
        attributes.average(unit)
    return False


def apply(due: Due, state: OptimizerState, ahead: Ahead, updater: Updater) -> None:
    """Update all units. Gradients are used up, and stay for who clears them."""
    for unit in [unit for unit in due.units if unit.state_store.parked is not None]:
        unit.state_store.fetch_state()  # policies of updates read it before any unit is updated
    state.sharding.adopt_edits()
    factor = due.factor
    direct = {unit for unit in due.units if updater.reads_host_gradients(unit)}
    grads = [(unit, grad) for unit in due.units if not unit.gradients.leaves for grad in unit.gradients.sums or ()]
    first = any((grad.dtype, grad.device) != (unit.shard.dtype, unit.shard.device) for unit, grad in grads)
    early = ahead.settle(factor, first=first)
    done = set(early)
    grads = [(unit, grad) for unit, grad in grads if unit not in done]
    for unit in dict.fromkeys(unit for unit, _ in grads):
        unit.gradients.scale(due.weights[unit])
        if first:  # before it is cast: a loss scale may be more than the other format holds
            unit.gradients.scale(factor)
    for unit in (unit for unit in due.units if unit.gradients.leaves and unit not in direct | done):
        unit.gradients.scale(due.weights[unit] * (factor if scales_before_cast(unit) else 1.0))
    gone = {unit: absent for unit, absent in zip(due.units, due.unused, strict=True) if unit not in done}
    for unit, absent in gone.items():
        if absent and len(absent) < len(unit.params) and unit.gradients.has_sums:
            state.split(unit)
    updater.begin(due.units)
    publish(dict.fromkeys(early))
    single = [unit for unit in gone if unit.state_store.alone or unit.gradients.leaves]
    batches = [[unit for unit in gone if unit not in set(single)], *([unit] for unit in single)]
    for batch, after in zip(batches, [*batches[1:], []], strict=True):
        for unit in batch:
            unit.state_store.fetch_state()
        for unit in after:
            unit.state_store.begin_fetch()
        if batch and batch[0] in direct:
            _update_direct(batch[0], gone[batch[0]], factor * due.weights[batch[0]], updater)
        else:
            scaled = any(scales_before_cast(unit) if unit.gradients.leaves else first for unit in batch)
            _update({unit: gone[unit] for unit in batch}, 1.0 if scaled else factor, updater)
    updater.finish()


def _update(units: Mapping[Unit, set[int]], factor: float, updater: Updater) -> None:
    """Update units, of which some parameters were used by nobody, in one call of the optimizer; see `state_stores.py`."""
    if not units:
        return
    for unit, absent in units.items():
        for part in _used_parts(unit, absent):
            grad = unit.gradients.view(part.start, part.stop)
            if grad is not None:
                part.tensor.grad = unit.state_store.gradient(grad, part.tensor)
    written, copies = _targets(units, updater)
    if copies:
        grads: dict[Tensor, Tensor] = {
            part.tensor: part.tensor.grad for unit in units for part in unit.parts if part.tensor.grad is not None
        }
        updater.update_fused(FusedOps(grad_scale=factor, grads=grads, copies=copies))
    else:
        updater.update(units, factor)
    for unit in units:
        for part in unit.parts:
            part.tensor.grad = None
    publish(written)


def _update_direct(unit: Unit, absent: set[int], factor: float, updater: Updater) -> None:
    """Update a unit with gradients that are on the host, in the format in which they came."""
    parts = _used_parts(unit, absent) if unit.gradients.has_sums else []
    grads: dict[Tensor, Tensor] = {
        p.tensor: unit.gradients.narrow_view(p.start, p.stop).view(p.tensor.shape) for p in parts
    }
    written, copies = _targets({unit: absent}, updater)
    updater.update_fused(FusedOps(grad_scale=factor, grads=grads, copies=copies))
    publish(written)


def _used_parts(unit: Unit, absent: set[int]) -> list[OptimizerSlice]:
    return [part for part in unit.parts if not absent or not absent.issuperset(part.members)]


def _targets(
    units: Mapping[Unit, set[int]], updater: Updater
) -> tuple[dict[Unit, Tensor | None], dict[Tensor, Tensor]]:
    """Return for each unit where the update writes its new values besides, and the same by part; nothing where some part is not updated."""
    written: dict[Unit, Tensor | None] = dict.fromkeys(units)
    copies: dict[Tensor, Tensor] = {}
    for unit, absent in units.items():
        parts = _used_parts(unit, absent) if unit.gradients.has_sums else []
        if not updater.writes_copies() or sum(p.stop - p.start for p in parts) != unit.layout.shard_numel:
            continue
        target = unit.storage.publish_target()
        if target is None or target.dtype not in _COPIED:
            continue
        written[unit] = target
        copies |= {part.tensor: target[part.start : part.stop].view(part.tensor.shape) for part in parts}
    return written, copies


_COPIED = (torch.float32, torch.bfloat16, torch.float16)


def publish(units: Mapping[Unit, Tensor | None]) -> None:
    """Publish the new values of the units' shards and store them to their offload target.

    Args:
        units: And of each the memory to which its update has written them.
    """
    for unit, target in units.items():
        unit.mark_updated(target)
        unit.state_store.store()
