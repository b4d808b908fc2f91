"""What the user's optimizer can do, found out by asking it and not by its name: take shards, and multiply gradients while it updates.

An optimizer is *elementwise* if updating a tensor in pieces gives what updating it whole gives; then any shard will do. It is *per
tensor* if tensors do not influence each other, though their elements do (Muon, LAMB, Adafactor); then every parameter must be whole on
one rank. One that is neither (L-BFGS) cannot be sharded. To find out, it steps three small tensors of its own class and settings, whole
and in pieces. Nothing random is drawn and the optimizer itself is not touched.

A step has one factor for all gradients: the average over ranks, the loss scale and the clipping coefficient in one. ds-ops' optimizers
take it as an argument; torch's fused ones divide by the attribute `grad_scale`, as torch.amp.GradScaler uses it. With all others the
gradients are multiplied first: one read and one write more.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ds_config.errors import PlanError, UnsupportedError
from ds_ops.optim import Fusion, OpsOptimizer
from ds_zero._torch import plain_step
from ds_zero.layout.elements import Kind
from ds_zero.layout.options import Habits, Placement, ShardOptions, dtype_name
from ds_zero.layout.precision import Precision
from ds_zero.runtime.sharding import Sharding
from ds_zero.runtime.unit import Unit

__all__ = [
    "WAITING",
    "Updater",
    "check_early",
    "check_inner",
    "group_of",
    "habits_of",
    "owns_reduction",
    "settings_of",
    "state_format",
    "step_with",
]

WAITING = "zenflow_sum"
"""Name of a state that a policy of updates may keep: the sum of an element's gradients that wait for their update."""
_SHAPE, _CUT, _STEPS = (8, 6), 20, 3


def habits_of(optimizer: Optimizer, asked: Kind | None) -> dict[int, Habits]:
    """Of each optimizer group: the layout that was asked for where it will do, else the one the optimizer needs; and what it keeps.

    Raises:
        UnsupportedError: the optimizer cannot be sharded, or not in the layout asked for ("zero-optimizer").
    """
    habits: dict[int, Habits] = {}
    for number, group in enumerate(optimizer.param_groups):
        # The step of one that reduces is collective and depends on how far it is, so it is not asked to step.
        declared: Kind = "flat" if getattr(optimizer, "elementwise", True) else "whole"
        found = Habits(declared) if owns_reduction(optimizer) else _habits(optimizer, group)
        if found.layout == "whole" and asked not in (None, "whole"):
            raise UnsupportedError(
                f"{type(optimizer).__name__} needs whole parameters, layout {asked!r} was asked for",
                code="zero-optimizer",
                fix='Leave layout at None, or pass layout="whole".',
            )
        habits[number] = found if asked is None else replace(found, layout=asked)
    return habits


def owns_reduction(optimizer: Optimizer) -> bool:
    """Whether an optimizer averages gradients over ranks itself; it says so by an attribute of this name."""
    return bool(getattr(optimizer, "owns_reduction", False))


def check_inner(model: nn.Module, optimizer: Optimizer, options: ShardOptions) -> None:
    """What was asked can be done with this optimizer.

    Raises:
        PlanError: it has parameters that the model does not have ("zero-foreign-parameters"), or its updates cannot begin during backward
            ("zero-early").
        UnsupportedError: it reduces what is sharded ("optimizer-owns-reduction"), or cannot keep its state in the format asked for
            ("zero-state-dtype").
    """
    if isinstance(options.tier, Placement) and options.tier.early:
        check_early(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in params if id(p) not in names]
    if foreign:
        raise PlanError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, of shapes {foreign[:5]}",
            code="zero-foreign-parameters",
            fix="Build the optimizer from model.parameters() of the model given to `shard`, or put the others into a module of it.",
        )
    if owns_reduction(optimizer) and options.residency.shard_optim:
        raise UnsupportedError(
            f"{type(optimizer).__name__} reduces gradients itself, and stage {options.stage} shards what it would reduce",
            code="optimizer-owns-reduction",
            fix="Use stage 0 with it.",
        )
    precision = Precision.of(options.precision)
    for param in params:
        dtypes = precision.resolve(param.dtype, names[id(param)])
        if dtypes.state is not None and not _keeps(optimizer, dtypes.master, dtypes.state):
            raise UnsupportedError(
                f"{names[id(param)]}: {type(optimizer).__name__} cannot keep its state in {dtype_name(dtypes.state)} beside a master "
                f"in {dtype_name(dtypes.master)}",
                code="zero-state-dtype",
                fix="Use an optimizer of ds_ops.optim with a state in fp32, bf16 or fp16, or leave the state's format out.",
            )


def _keeps(optimizer: Optimizer, master: torch.dtype, state: torch.dtype) -> bool:
    """Whether an optimizer can keep its state in a format beside a master in another; what torch's do anyway is that of the master."""
    return OpsOptimizer.keeps(master, state) if isinstance(optimizer, OpsOptimizer) else state == master


def state_format(optimizer: Optimizer, param: Tensor) -> torch.dtype:
    """The format in which an optimizer keeps its state of a parameter."""
    return optimizer.state_dtype_of(param) if isinstance(optimizer, OpsOptimizer) else param.dtype


def _habits(optimizer: Optimizer, group: dict[str, Any]) -> Habits:
    """`"flat"` for an elementwise optimizer, `"whole"` for a per-tensor one, with the settings of one of its groups."""
    first = [_wave(_SHAPE, 0.3)]
    try:
        (alone, states), (together, _) = (
            _run(optimizer, group, first),
            _run(optimizer, group, [*first, _wave((6, 10), 1.7)]),
        )
    except Exception as error:  # whatever a foreign optimizer raises is the reason to give
        raise _neither(optimizer, f"it cannot step a tensor of shape {_SHAPE}: {error}") from error
    if not _close(alone, together[:1]):
        raise _neither(optimizer, "the update of one tensor depends on the others")
    flat = first[0].reshape(-1)
    try:
        pieces, _ = _run(optimizer, group, [flat[:_CUT].clone(), flat[_CUT:].clone()])
    except Exception:  # it takes no vectors, so it takes no shards
        return Habits("whole", states)
    return Habits("flat" if _close([alone[0].reshape(-1)], [torch.cat(pieces)]) else "whole", states)


def _run(optimizer: Optimizer, group: dict[str, Any], values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """The tensors after a few steps, and how many tensors as large as the first the optimizer keeps for it."""
    params = [Parameter(value.clone()) for value in values]
    twin = object.__new__(type(optimizer))
    own = {k: copy.copy(v) if isinstance(v, dict | list | set) else v for k, v in optimizer.__dict__.items()}
    twin.__dict__.update(own)
    twin.state = defaultdict(dict)
    settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    if isinstance(settings.get("lr"), float) and settings["lr"] == 0.0:
        settings["lr"] = 1e-2  # a warm-up begins at zero; nothing would move
    twin.param_groups = [{**settings, "params": params}]
    step = plain_step(type(optimizer))
    for number in range(_STEPS):
        for param in params:  # a function of each element, so the same whole and in pieces
            turned = param.detach() * (5.0 + number) + 0.5
            param.grad = turned / (1.0 + turned * turned)
        step(twin)
    kept = [v for v in twin.state[params[0]].values() if isinstance(v, Tensor) and v.shape == params[0].shape]
    return [param.detach() for param in params], len(kept)


def _wave(shape: tuple[int, ...], phase: float) -> Tensor:
    # Not torch.sin: its first call loads a library, which takes longer than everything else here.
    return torch.tensor([math.sin(0.7 * i + phase) for i in range(math.prod(shape))]).reshape(shape)


def _close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=True))


def _neither(optimizer: Optimizer, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} cannot be sharded: {why}",
        code="zero-optimizer",
        fix="Use an optimizer that treats elements, or at least parameters, independently of each other.",
    )


def check_early(optimizer: Optimizer) -> None:
    """Single units can be updated before their step (`ahead.py`).

    Raises:
        PlanError: they cannot ("zero-early").
    """
    kind, why = type(optimizer), ""
    if not isinstance(optimizer, OpsOptimizer) or not optimizer.elementwise:
        why = "which is no optimizer of ds-ops that treats elements apart"
    elif plain_step(kind) is not plain_step(OpsOptimizer):
        why = "whose step is its own"
    if why:
        raise PlanError(
            f"updates that begin during backward, with {kind.__name__}, {why}",
            code="zero-early",
            fix="Use Adam or AdamW of the configuration (or of ds_ops.optim), or leave super_offload and Placement.early out.",
        )


def group_of(optimizer: Optimizer, unit: Unit) -> dict[str, Any]:
    """The optimizer's group that a unit's parameters are in."""
    group: dict[str, Any] = optimizer.param_groups[unit.spec.params[0].group or 0]
    return group


def settings_of(optimizer: Optimizer, unit: Unit) -> tuple[tuple[str, Any], ...]:
    """What the group of a unit says besides its parameters, as it is now."""
    found = [(k, v) for k, v in list(group_of(optimizer, unit).items()) if k != "params"]
    return tuple((k, v.tolist() if isinstance(v, Tensor) else v) for k, v in found)


_FUSED = (Adam, AdamW, SGD, Adagrad)
_LARGEST = 1e30  # its inverse is a normal fp32, too


def step_with(optimizer: Optimizer, grads: Sequence[Tensor], factor: float) -> None:
    """`optimizer.step()` with every gradient multiplied by `factor`.

    Args:
        grads: The memory of all gradients, each element once; it may be changed.
    """
    if factor == 1.0:
        optimizer.step()
    elif isinstance(optimizer, OpsOptimizer):
        optimizer.step(fusion=Fusion(grad_scale=factor))
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


def _step_divided(optimizer: Optimizer, divisor: float) -> None:
    told: Any = optimizer  # both attributes exist during a step only
    told.grad_scale = torch.tensor(divisor, dtype=torch.float32)
    told.found_inf = torch.zeros((), dtype=torch.float32)
    try:
        optimizer.step()
    finally:
        del told.grad_scale, told.found_inf


class Updater:
    """Steps every element in every step. The seat of policies that do otherwise, see `ShardOptions.updates`."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def moved(self, sharding: Sharding) -> None:
        """The model was planned anew."""

    def begin(self, units: Sequence[Unit]) -> None:
        """Decide what this step does, on all ranks alike; gradients are final."""

    def update(self, units: Mapping[Unit, set[int]], factor: float) -> None:
        """Step the parts of units that have a gradient, which is multiplied by `factor`. Gradients may be changed."""
        step_with(self.inner, [grad for u in units for grad in u.gradients.sums or ()], factor)

    def finish(self) -> None:
        """All units were stepped."""

    def foresees(self) -> bool:
        """Whether what the coming step does is decided before its gradients are there, so that units can be updated early."""
        return True

    def early(self, unit: Unit, grads: Mapping[Tensor, Tensor], factor: float) -> None:
        """Update one unit before its step, on a thread of its own.

        Args:
            grads: By part; they stay as they are.
        """
        if isinstance(self.inner, OpsOptimizer):
            self.inner.step_group(group_of(self.inner, unit), Fusion(grad_scale=factor, grads=grads))

    def state_dict(self) -> dict[str, Any]:
        """What it adds to the optimizer's. JSON-able, the same on every rank. Collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the optimizer's `state_dict`. What waited in a run with a policy would never be used here."""
        for kept in self.inner.state.values():
            kept.pop(WAITING, None)
