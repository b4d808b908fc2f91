"""Families of parameters: what a package that cuts a model tells the one that shards and averages it.

Words: a *family* is a set of parameters that live on the same ranks and are averaged alike: dense ones, experts, parts of
tensor-parallel layers, weights tied over pipeline stages. A package that cuts a model (experts, tensor parallelism, stages)
*assigns* its parameters; ds-zero, clipping and checkpoints read the assignment and ask nobody which package made it. A
parameter without one is dense: the same on all ranks that the model was given to. A *logical* tensor is what a checkpoint holds; a
parameter is a box of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from ds_comm.ddp import watch_ddp
from ds_comm.groups import Group
from ds_comm.placement import Box, Interval, TensorShard
from ds_config.errors import PlanError

__all__ = ["Logical", "ParamSharding", "ReductionGroup", "logical_of", "param_sharding", "set_param_sharding"]


@dataclass(frozen=True, slots=True, eq=False)
class ReductionGroup:
    """Ranks of a set of parameters, and how their gradients become one.

    Attributes:
        name: Short, the same on every rank: `"expert"`, `"tensor"`, `"tied"`.
        group: The ranks that hold these parameters with equal values. A gradient is summed over all of them.
        divisor: What that sum is divided by: the ranks that the batch is split over, whatever the size of `group`.
        shards: The ranks of `group` over which state is cut; None: those of them that the model was given to. Other ranks of `group`
            (a weight tied over pipeline stages) only take part in the sum, after the last backward of a step.
        copies: How many groups like `group` hold equal values and equal gradients of the same parameter, this one included: a
            norm over all ranks counts each square once by dividing by it.
    """

    name: str
    group: Group
    divisor: int
    shards: Group | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        inside = self.shards is None or set(self.shards.ranks) <= set(self.group.ranks)
        if self.divisor < 1 or self.copies < 1 or not inside:
            raise PlanError(
                f"family {self.name!r}: divisor {self.divisor}, copies {self.copies}, sums over {self.group}, "
                f"cut over {self.shards}",
                code="comm-family",
                fix="Give a divisor and copies of at least 1, and cut over ranks that sums go over.",
            )


@dataclass(frozen=True, slots=True, eq=False)
class ParamSharding:
    """A parameter's family, and which part of which logical tensor it is.

    Attributes:
        family: None: dense, that is the ranks that the model was given to.
        name: Of the logical tensor in checkpoints, the same whatever the degrees; None: the parameter's own qualified name.
        shape: Of the logical tensor; None: the parameter's own.
        box: The part of it that the parameter is, in the logical tensor's dims; None: all of it. The parameter has the box's
            shape, row-major.
    """

    family: ReductionGroup | None = None
    name: str | None = None
    shape: tuple[int, ...] | None = None
    box: Box | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) != (self.box is None):
            raise PlanError(
                f"a parameter is box {self.box} of shape {self.shape}: one says nothing without the other",
                code="comm-family",
                fix="Give both, or neither for a parameter that is all of its logical tensor.",
            )


_MARK = "_ds_assignment"
_DENSE = ParamSharding()


def set_param_sharding(param: Tensor, assignment: ParamSharding) -> None:
    """Set the sharding of a parameter or buffer, before the model is sharded; the last call counts."""
    setattr(param, _MARK, assignment)
    if assignment.family is not None:
        watch_ddp(_strangers)


def _strangers(param: Tensor, ranks: Collection[int]) -> Collection[int]:
    """Those of `ranks` that are not of the family."""
    family = param_sharding(param).family
    return () if family is None else set(ranks) - set(family.group.ranks)


def param_sharding(param: Tensor) -> ParamSharding:
    """Return the sharding set for `param`; dense and whole by default."""
    sharding: ParamSharding = getattr(param, _MARK, _DENSE)
    return sharding


@dataclass(frozen=True, slots=True)
class Logical:
    """Which part of which logical tensor a parameter is: an `ParamSharding` in which nothing is left out."""

    name: str
    shape: tuple[int, ...]
    box: Box

    def shard(self, prefix: str, dtype: str, interval: Interval, suffix: str = "") -> TensorShard:
        """Describe the elements `interval` of the flattened parameter as a tensor shard."""
        return TensorShard(f"{prefix}/{self.name}{suffix}", self.shape, dtype, self.box, interval)

    @property
    def whole(self) -> bool:
        """Whether the parameter is all of the logical tensor."""
        return self.box.shape == self.shape


def logical_of(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Logical:
    """Return the logical tensor of which tensor `name` is a part.

    Args:
        shape: The parameter's true shape, if `tensor` does not have that shape.
    Raises:
        PlanError: the tensor does not have the shape of its box ("zero-reduction-group").
    """
    sharding: ParamSharding = param_sharding(tensor)
    local_shape = tuple(tensor.shape) if shape is None else shape
    box, of = sharding.box or Box.whole(local_shape), sharding.shape or local_shape
    inside = len(box.shape) == len(of) and all(o + s <= n for o, s, n in zip(box.offset, box.shape, of, strict=True))
    if box.shape != local_shape or not inside:
        raise PlanError(
            f"{name} has shape {local_shape} and was assigned {box} of a tensor of shape {of}",
            code="zero-reduction-group",
            fix="Assign the box that the parameter is, in the logical tensor's dims.",
        )
    return Logical(sharding.name or name, of, box)
