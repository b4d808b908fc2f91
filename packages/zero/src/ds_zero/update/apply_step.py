"""One update of a model, decided: early updates that hold stay, all others are made now, and new values go where gathers send them from.

Units whose gradients are on the host are updated one after another, so that the new weights of one go back to the device while the next is
updated; all others by one call of the optimizer.

A step has one factor for all gradients: the average over ranks, the loss scale and the clipping coefficient in one. ds-ops' optimizers
take it as an argument; torch's fused ones divide by the attribute `grad_scale`, as torch.amp.GradScaler uses it, and write what they
divided. With all others the gradients are multiplied first: one read and one write more.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ds_config.errors import PlanError
from ds_ops.optim import FusedOps, Muon, OpsOptimizer
from ds_zero._torch import has_step_hooks, plain_step
from ds_zero.runtime.attributes import GradAttributes
from ds_zero.runtime.sharded_model import ShardedModel
from ds_zero.runtime.unit import OptimizerSlice, Unit
from ds_zero.update.optimizer_state import OptimizerState
from ds_zero.update.wrapped_optimizer import WAITING, group_of

__all__ = [
    "Due",
    "StepGuard",
    "Updater",
    "apply",
    "due_of",
    "make_directions",
    "scale_in_place",
    "scales_before_cast",
    "step_with",
]


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


def make_directions(
    units: Sequence[Unit], factor_of: Callable[[Unit], float], unused: Sequence[set[int]], optimizer: Muon
) -> None:
    """Replace the gradients of matrices by the directions of the coming step, which are clipped then.

    Args:
        factor_of: As of `due_of`.
        unused: As of `Due`.
    """
    batches: dict[tuple[float, Unit | None], dict[Unit, list[OptimizerSlice]]] = {}
    for unit, absent in zip(units, unused, strict=True):
        parts = _used_parts(unit, absent) if unit.gradients.has_sums else []
        if any(optimizer.is_matrix(group_of(optimizer, unit), part.tensor) for part in parts):
            alone = unit if unit.state_store.alone else None
            batches.setdefault((factor_of(unit), alone), {})[unit] = parts
    for (factor, _), batch in batches.items():
        grads: dict[Tensor, Tensor] = {}
        sums_of: dict[Tensor, Tensor] = {}
        for unit, parts in batch.items():
            unit.state_store.fetch_state()
            unit.gradients.change()
            for part, sums in zip(parts, unit.gradients.cut([(p.start, p.stop) for p in parts]), strict=True):
                if optimizer.is_matrix(group_of(optimizer, unit), part.tensor):
                    sums_of[part.tensor] = sums.view(part.tensor.shape)
                    grads[part.tensor] = _converted(sums_of[part.tensor], part.tensor, unit)
                else:
                    sums.mul_(factor)
            unit.gradients.applied *= factor  # what the sums are now nobody multiplies by that again
        optimizer.direct(FusedOps(grad_scale=factor, grads=grads))
        for tensor, sums in sums_of.items():
            if grads[tensor] is not sums:
                sums.copy_(grads[tensor])
        for unit in batch:
            if not unit.state_store.resident:
                unit.state_store.store()


def apply(
    due: Due, state: OptimizerState, updater: Updater, settle: Callable[[float, bool], list[Unit]] | None = None
) -> None:
    """Update all units. Gradients are used up, and stay for who clears them.

    Args:
        settle: Returns the units that an early update has updated on the terms of this step, see `Ahead.settle`; None: there are none.
    """
    for unit in [unit for unit in due.units if unit.state_store.parked is not None]:
        unit.state_store.fetch_state()  # policies of updates read it before any unit is updated
    state.sharding.adopt_edits()
    factor = due.factor
    direct = {unit for unit in due.units if updater.reads_host_gradients(unit)}
    grads = [(unit, grad) for unit in due.units if not unit.gradients.leaves for grad in unit.gradients.sums or ()]
    first = any((grad.dtype, grad.device) != (unit.shard.dtype, unit.shard.device) for unit, grad in grads)
    early = [] if settle is None else settle(factor, first)
    done = set(early)
    grads = [(unit, grad) for unit, grad in grads if unit not in done]
    for unit in dict.fromkeys(unit for unit, _ in grads):
        # Before it is cast: a loss scale may be more than the other format holds; and so may the weight without it.
        unit.gradients.scale(due.weights[unit] * (factor if first else 1.0))
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
            if not unit.state_store.resident:
                unit.state_store.fetch_state()
        for unit in after:
            unit.state_store.begin_fetch()
        if batch and batch[0] in direct:
            _update_direct(batch[0], gone[batch[0]], factor * due.weights[batch[0]], updater)
        else:
            scaled = any(scales_before_cast(unit) if unit.gradients.leaves else first for unit in batch)
            _update({unit: gone[unit] for unit in batch}, 1.0 if scaled else factor, updater)
    if not due.units:
        updater.update({}, 1.0)  # optimizers that count steps in their groups count those of a rank that trains nothing
    updater.finish()
    if state.fills_gaps:
        state.clear_gaps(due.units)


def _update(units: Mapping[Unit, set[int]], factor: float, updater: Updater) -> None:
    """Update units, of which some parameters were used by nobody, in one call of the optimizer; see `state_stores.py`."""
    if not units:
        return
    for unit, absent in units.items():
        for part in _used_parts(unit, absent):
            grad = unit.gradients.view(part.start, part.stop)
            if grad is not None:
                part.tensor.grad = _converted(grad, part.tensor, unit)
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


def scales_before_cast(unit: Unit) -> bool:
    """Whether gradients on the host are multiplied in their own format, because that of the master holds less."""
    return unit.dtypes.accumulate != unit.dtypes.master


def _converted(grad: Tensor, part: Tensor, unit: Unit) -> Tensor:
    """Return a summed gradient in the shape and dtype of the optimizer's part, on its device."""
    if (grad.shape, grad.dtype, grad.device) == (part.shape, part.dtype, part.device):
        return grad
    return unit.state_store.gradient(grad, part)


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
        if target is None or target.dtype not in _COPIED or any(p.tensor.device != target.device for p in parts):
            continue  # among them weights that rest on the host between uses, of an optimizer on the device
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
        if not unit.state_store.resident:
            unit.state_store.store()


# ---- the optimizer's step

_FUSED = (Adam, AdamW, SGD, Adagrad)
_LARGEST = 1e30  # its inverse is a normal fp32, too


def step_with(optimizer: Optimizer, grads: Sequence[Tensor], factor: float) -> None:
    """Call `optimizer.step()` with every gradient multiplied by `factor`.

    Args:
        grads: The memory of all gradients, each element once; it may be changed.
    """
    if factor == 1.0:
        optimizer.step()
    elif isinstance(optimizer, OpsOptimizer):
        optimizer.step(fusion=FusedOps(grad_scale=factor))
    elif _divides(optimizer, grads) and 1 / _LARGEST < factor < _LARGEST:
        _step_divided(optimizer, 1.0 / factor)
    else:
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()


def _divides(optimizer: Optimizer, grads: Sequence[Tensor]) -> bool:
    # The divisor is an fp32, which is not enough for wider gradients. A subclass may do something else in its step.
    fused = type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)
    return fused and all(grad.dtype.itemsize <= 4 for grad in grads)


@functools.cache
def _leaves_divided(kind: str, device: str) -> bool:
    """Whether torch's fused step of this kind leaves divided gradients in their memory: asked of torch, which promises it nowhere."""
    param = torch.nn.Parameter(torch.ones(1, device=device))
    param.grad = torch.full((1,), 8.0, device=device)
    (untyped,) = (made([param], lr=1e-3, fused=True) for made in _FUSED if made.__name__ == kind)
    _step_divided(untyped, 4.0)
    return param.grad.item() == 2.0


@functools.lru_cache(maxsize=16)
def _divisor(value: float) -> tuple[Tensor, Tensor]:
    """Return what a fused step reads, and never writes: a divisor, and that no gradient is infinite."""
    return torch.tensor(value, dtype=torch.float32, device="cpu"), torch.zeros((), dtype=torch.float32, device="cpu")


def _step_divided(optimizer: Optimizer, divisor: float) -> None:
    untyped: Any = optimizer  # both attributes exist during a step only
    untyped.grad_scale, untyped.found_inf = _divisor(divisor)
    try:
        optimizer.step()
    finally:
        del untyped.grad_scale, untyped.found_inf


class StepGuard:
    """A hook before `step` of an optimizer that was given to `shard`: called by anybody else than its owner, it would do nothing, with no word.

    Args:
        owner: Calls it while it is `updating`. Only a weak reference is kept.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner = self._owner()
        if owner is None or owner.inner is not optimizer or owner.updating:
            return
        raise PlanError(
            f"step() of the {type(optimizer).__name__} that was given to `shard`: it has shards, whose gradients come in step() of the optimizer "
            "that `shard` returned",
            code="zero-inner-step",
            fix="optimizer = ds_zero.shard(model, optimizer); with an engine call engine.step().",
        )


class Updater:
    """Steps every element in every step. The extension point of policies that do otherwise, see `ShardOptions.updates`."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def moved(self, sharding: ShardedModel) -> None:
        """Update references to the model's units after the model was planned anew."""

    def begin(self, units: Sequence[Unit]) -> None:
        """Decide what this step does, on all ranks alike; gradients are final."""

    def update(self, units: Mapping[Unit, set[int]], factor: float) -> None:
        """Step the parts of units that have a gradient, which is multiplied by `factor`. Gradients may be changed."""
        step_with(self.inner, [grad for u in units for grad in u.gradients.sums or ()], factor)

    def leaves_scaled(self, units: Sequence[Unit], factor: float) -> bool:
        """Whether `update` of these units with `factor` also multiplies what lies in the memory of their sums."""
        inner, grads = self.inner, [grad for unit in units for grad in unit.gradients.sums or ()]
        if type(self).update is not Updater.update or not grads or not _divides(inner, grads):
            return False
        if has_step_hooks(inner, StepGuard) or factor == 1.0:
            return False  # hooks see averages
        stepped = {id(param) for group in inner.param_groups for param in group["params"]}
        if any(id(part.tensor) not in stepped for unit in units for part in unit.parts):
            return False  # nobody divides what was taken out of the groups
        return (
            1 / _LARGEST < factor < _LARGEST
            and not any(group.get("maximize") for group in inner.param_groups)
            and all(
                not unit.gradients.leaves and (grad.dtype, grad.device) == (unit.shard.dtype, unit.shard.device)
                for unit in units
                for grad in unit.gradients.sums or ()
            )
            and _leaves_divided(type(inner).__name__, grads[0].device.type)
        )

    def reads_host_gradients(self, unit: Unit) -> bool:
        """Whether the unit's gradients are on the host, and are read there in the format in which they came: by ds-ops' optimizers."""
        return self.writes_copies() and unit.gradients.leaves

    def writes_copies(self) -> bool:
        """Whether an update writes the new values in another format, too, in the same pass."""
        inner = self.inner
        if not isinstance(inner, OpsOptimizer) or plain_step(type(inner)) is not plain_step(OpsOptimizer):
            return False
        return inner.elementwise and type(inner).step_bucket is OpsOptimizer.step_bucket

    def update_fused(self, fusion: FusedOps) -> None:
        """Step the parameters that `fusion` has gradients of."""
        if isinstance(self.inner, OpsOptimizer):
            self.inner.step(fusion=fusion)

    def finish(self) -> None:
        """Finish the update after all units were stepped."""

    def foresees(self) -> bool:
        """Whether what the coming step does is decided before its gradients are there, so that units can be updated early."""
        return True

    def early(self, unit: Unit, grads: Mapping[Tensor, Tensor], factor: float) -> None:
        """Update one unit before its step, on a thread of its own.

        Args:
            grads: By part; they stay as they are.
        """
        if isinstance(self.inner, OpsOptimizer):
            self.inner.step_group(group_of(self.inner, unit), FusedOps(grad_scale=factor, grads=grads))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries added to the optimizer's state dict. JSON-able, the same on every rank. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the optimizer's `state_dict`. What waited in a run with a policy would never be used here."""
        for entries in self.inner.state.values():
            entries.pop(WAITING, None)
