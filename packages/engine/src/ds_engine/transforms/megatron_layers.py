"""Tensor parallelism that the model brings itself: layers of Megatron's kind, which hold parts and exchange what they need.

Nothing is cut. A parameter marked `tensor_model_parallel` or `model_parallel` (Megatron's and DeepSpeed's attributes) is this rank's
part of a larger one; all others are the same on every rank of the tensor axis, with the same gradient, which their layers see to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ds_comm import Group
from ds_comm.placement import Box
from ds_comm.reduction_group import ParamSharding, ReductionGroup, param_sharding, set_param_sharding
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput

__all__ = ["Own", "OwnLayers"]


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """How many ranks a layer of the model is spread over."""

    degree: int


@dataclass(frozen=True, slots=True)
class Own:
    """What was said of parameters before."""

    before: tuple[tuple[nn.Parameter, ParamSharding], ...]


class OwnTensor(Transform[OwnLayers, Own]):
    """Where `tensor_parallel.megatron_layers` says so, or an mpu has tensor-parallel ranks of which the configuration knows nothing."""

    name = "layers of the model's own"

    def decide(self, inputs: TransformInput) -> OwnLayers | None:
        section = inputs.config.tensor_parallel
        if section is None or not section.megatron_layers or inputs.mesh.tensor == 1:
            return None
        return OwnLayers(inputs.mesh.tensor)

    def plan_rows(self, what: OwnLayers) -> Mapping[str, str]:
        return {"tensor parallel": f"the model's own layers, over {what.degree} ranks; nothing is cut"}

    def apply(self, what: OwnLayers, site: BuildContext) -> Own:
        del what
        tensor, gradient = site.mesh["tensor"], site.mesh["gradient"]
        part = ReductionGroup("tensor", gradient, gradient.size)
        same = ReductionGroup(f"tensor-{tensor.size}", gradient, gradient.size, copies=tensor.size)
        # Stages have named theirs, and tied some; layers of experts say theirs after this.
        named = [(name, param, param_sharding(param)) for name, param in site.model.named_parameters()]
        tied = {id(f): _tied(f, tensor.size) for _, _, was in named if (f := was.family) is not None}
        for name, param, was in named:
            mine, copied = (part, same) if was.family is None else (was.family, tied[id(was.family)])
            set_param_sharding(
                param,
                _part(was.name or name, param, mine, tensor) if _is_part(param) else replace(was, family=copied),
            )
        return Own(tuple((param, was) for _, param, was in named))

    def undo(self, applied: Own) -> None:
        for param, was in applied.before:
            set_param_sharding(param, was)


def _tied(family: ReductionGroup, copies: int) -> ReductionGroup:
    """Return the family of parameters that stages of other tensor-parallel ranks tie with equal values, too."""
    return replace(family, name=f"{family.name}, tensor-{copies}", copies=family.copies * copies)


def _is_part(param: Tensor) -> bool:
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def _part(name: str, param: Tensor, family: ReductionGroup, group: Group) -> ParamSharding:
    """Return the sharding along `partition_dim` where the parameter has one; else a separate tensor per rank.

    The name of a separate tensor contains this rank's number.
    """
    dim = getattr(param, "partition_dim", -1)
    if not isinstance(dim, int) or not 0 <= dim < param.dim() or getattr(param, "partition_stride", 1) != 1:
        return ParamSharding(family, f"{name}.tensor{group.rank}of{group.size}")
    offset, shape = [0] * param.dim(), list(param.shape)
    offset[dim], shape[dim] = group.rank * param.shape[dim], group.size * param.shape[dim]
    return ParamSharding(family, name, tuple(shape), Box(tuple(offset), tuple(param.shape)))
