"""What the user's optimizer can do, found out by asking it and not by its name, when a model is sharded: take shards, and in which layout.

An optimizer is *elementwise* if updating a tensor in pieces gives what updating it whole gives; then any shard will do. It is *per
tensor* if tensors do not influence each other, though their elements do (Muon, LAMB, Adafactor); then every parameter must be whole on
one rank. One whose tensors do (one norm, or one rate that is found by all) is *coupled*: every rank must step the whole model, as at stage
0. One that needs the loss again (L-BFGS) cannot be sharded. `probe.py` finds out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from ds_comm.groups import as_group
from ds_comm.reduction_group import Logical
from ds_config.errors import PlanError, UnsupportedError
from ds_ops.optim import Muon, OpsOptimizer
from ds_zero._torch import plain_step
from ds_zero.layout.dtypes_plan import Precision
from ds_zero.layout.elements import Kind
from ds_zero.layout.model_members import named_members
from ds_zero.layout.reduction_groups import find_reduction_groups
from ds_zero.layout.shard_options import OffloadPolicy, OptimizerTraits, ShardOptions, dtype_name
from ds_zero.runtime.sharded_model import group_for, sharding_of
from ds_zero.runtime.unit import Unit
from ds_zero.update.probe import CannotStepError, ask, not_shardable, shapes_of

__all__ = [
    "WAITING",
    "check_coupled",
    "check_early",
    "check_inner",
    "check_members",
    "class_name_of",
    "group_of",
    "owns_reduction",
    "settings_of",
    "state_format",
    "tell_parts",
    "traits_of",
]


_log = logging.getLogger(__name__)
WAITING = "zenflow_sum"
"""Name of a state that a policy of updates may keep: the sum of an element's gradients that wait for their update."""


def traits_of(optimizer: Optimizer, layout: Kind | None) -> dict[int, OptimizerTraits]:
    """Return the OptimizerTraits of each optimizer group: its layout and its state per element.

    The layout is the requested one where it suffices, else the one the optimizer needs.

    Raises:
        UnsupportedError: the optimizer cannot be sharded, or not in the layout asked for ("zero-optimizer").
    """
    habits: dict[int, OptimizerTraits] = {}
    answers: dict[Any, OptimizerTraits] = {}
    for number, group in enumerate(optimizer.param_groups):
        # The step of one that reduces is collective and depends on how far it is, so it is not asked to step.
        declared: Kind = "flat" if getattr(optimizer, "elementwise", True) else "whole"
        traits = OptimizerTraits(declared) if owns_reduction(optimizer) else _answer(optimizer, group, layout, answers)
        if traits.layout == "whole" and layout not in (None, "whole"):
            raise UnsupportedError(
                f"{type(optimizer).__name__} needs whole parameters, layout {layout!r} was asked for",
                code="zero-optimizer",
                fix='Leave layout at None, or pass layout="whole".',
            )
        habits[number] = traits if layout is None else replace(traits, layout=layout)
    return habits


def _answer(
    optimizer: Optimizer, group: dict[str, Any], asked: Kind | None, answers: dict[Any, OptimizerTraits]
) -> OptimizerTraits:
    """What the optimizer does with one group. Groups that differ in their rates only, within a factor of ten, are asked once."""
    shapes, rates = shapes_of(group["params"]), ("lr", "initial_lr", "max_lr", "min_lr")
    rate = group.get("lr")
    decade = math.floor(math.log10(float(rate))) if isinstance(rate, Real | Tensor) and float(rate) > 0.0 else rate
    key = (shapes, repr(decade), repr([(k, v) for k, v in group.items() if k not in ("params", *rates)]))
    if key not in answers:
        try:
            answers[key] = ask(optimizer, group, shapes)
        except CannotStepError:
            if asked is None:
                raise
            answers[key] = OptimizerTraits(asked)
    return answers[key]


def tell_parts(
    optimizer: Optimizer, habits: Mapping[int, OptimizerTraits], logical: Sequence[tuple[int, Logical]]
) -> None:
    """Warn where an optimizer that needs whole parameters gets parts, which tensor or expert parallelism has cut.

    Args:
        logical: Of each parameter, its optimizer group and which part of which tensor it is. Muon does not mind where a stack of matrices is cut
            between them (experts by number); others have a norm of the stack.
    """
    stacks = isinstance(optimizer, Muon)
    parts = []
    for group, part in logical:
        first = int(stacks and len(part.shape) > 2)
        if habits[group].layout == "whole" and part.box.shape[first:] != part.shape[first:]:
            parts.append(part.name)
    if parts:
        _log.warning(
            "%s steps whole parameters, and %d are parts of tensors whose other parts are on other ranks (%s): each part is stepped by its own "
            "norm, which is not what one process computes. AdamW and Lion step elements",
            type(optimizer).__name__,
            len(parts),
            ", ".join(parts[:3]),
        )


def check_coupled(
    model: nn.Module, optimizer: Optimizer, options: ShardOptions, habits: Mapping[int, OptimizerTraits]
) -> None:
    """Check that every rank steps the whole model in one call, where the optimizer's tensors influence each other.

    Raises:
        UnsupportedError: a rank steps a part of it ("zero-optimizer").
    """
    if not any(one.coupled for one in habits.values()):
        return
    group = group_for(options)
    everyone = group if options.norm is None else as_group(options.norm)
    everywhere = everyone.ranks == group.ranks and len(find_reduction_groups(model, group)) == 1
    parts = options.residency.shard_optim and group.size > 1
    if parts or options.offload_optimizer != "device" or not everywhere:
        raise not_shardable(
            optimizer,
            "the update of one tensor depends on the others, which are not all on each rank (they are at stage 0 or on one rank, without offload, "
            "and without tensor, pipeline or expert parallelism)",
        )


def owns_reduction(optimizer: Optimizer) -> bool:
    """Whether an optimizer averages gradients over ranks itself; it says so by an attribute of this name."""
    return bool(getattr(optimizer, "owns_reduction", False))


def check_inner(model: nn.Module, optimizer: Optimizer, options: ShardOptions) -> None:
    """Check that the options can work with this optimizer.

    Raises:
        PlanError: the optimizer's updates cannot begin during backward ("zero-early").
        UnsupportedError: the optimizer reduces what is sharded ("optimizer-owns-reduction"), or cannot store its state
        in the dtype asked
            for ("zero-state-dtype").
    """
    if isinstance(options.offload_optimizer, OffloadPolicy) and options.offload_optimizer.overlap_ratio:
        check_early(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in named_members(model).items()}
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


def check_members(model: nn.Module, params: Sequence[Tensor], *, added: bool = False) -> None:
    """Check that an optimizer's parameters can be trained with the model. Those that are in no module of it are, beside its own.

    Args:
        added: These are a group that is added.
    Raises:
        PlanError: all of them are others than the model's, which has such that are trained: it was built for another model; or some are
            another sharded model's ("zero-foreign-parameters").
    """
    known = set(map(id, model.parameters()))
    outside = [p for p in params if id(p) not in known]
    plain = [p for p in outside if not isinstance(p, Parameter)]
    none = (
        bool(params) and len(outside) == len(params) and not added and any(p.requires_grad for p in model.parameters())
    )
    others = [p for p in outside if (owner := sharding_of(p)) is not None and owner.model is not model]
    if not (none or others or plain):
        return
    kinds = "and none of the model's" if none else f"{len(others)} of which are sharded with another model"
    raise PlanError(
        f"the optimizer has {len(outside)} parameters that are not the model's, of shapes {[tuple(p.shape) for p in outside[:5]]}, "
        + (f"{len(plain)} of which are no torch.nn.Parameter" if plain else kinds),
        code="zero-foreign-parameters",
        fix="Build the optimizer from model.parameters() of the model given to `shard`, as it is then; what is trained beside it must be an nn.Parameter.",
    )


def _keeps(optimizer: Optimizer, master: torch.dtype, state: torch.dtype) -> bool:
    """Whether an optimizer can keep its state in a format beside a master in another; what torch's do anyway is that of the master."""
    return OpsOptimizer.keeps(master, state) if isinstance(optimizer, OpsOptimizer) else state == master


def state_format(optimizer: Optimizer, param: Tensor, key: str) -> torch.dtype:
    """Return the dtype in which an optimizer stores the state `key` of a parameter."""
    return optimizer.state_dtype_for(param, key) if isinstance(optimizer, OpsOptimizer) else param.dtype


_LIBRARIES = ("torch.optim.", "ds_ops.", "ds_comm.")


def class_name_of(optimizer: Optimizer) -> str:
    """Return the name of the class whose update rule an optimizer has, by which a checkpoint knows it.

    A subclass without a step of its own has the rule of the library's class that it derives from.
    """
    kinds = type(optimizer).__mro__
    rule = next(kind for kind in kinds if "step" in vars(kind) or kind.__module__.startswith(_LIBRARIES)).__name__
    decoupled = getattr(optimizer, "decoupled", False) or optimizer.defaults.get("decoupled_weight_decay", False)
    return "AdamW" if rule == "Adam" and decoupled else rule


def check_early(optimizer: Optimizer) -> None:
    """Check that single units can be updated before their step (`overlapped_update.py`).

    Raises:
        PlanError: the optimizer does not allow early updates ("zero-early").
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
            fix="Use Adam or AdamW of the configuration (or of ds_ops.optim), or leave super_offload and OffloadPolicy.overlap_ratio out.",
        )


def group_of(optimizer: Optimizer, unit: Unit) -> dict[str, Any]:
    """Return the optimizer group that contains a unit's parameters."""
    group: dict[str, Any] = optimizer.param_groups[unit.spec.params[0].group or 0]
    return group


def settings_of(optimizer: Optimizer, unit: Unit) -> tuple[tuple[str, Any], ...]:
    """Return the current settings of a unit's optimizer group, without its parameters."""
    settings = [(k, v) for k, v in list(group_of(optimizer, unit).items()) if k != "params"]
    return tuple((k, v.tolist() if isinstance(v, Tensor) else v) for k, v in settings)
