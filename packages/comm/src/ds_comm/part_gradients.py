"""Gradients of a model of which ranks hold different parts, in a loop without an engine: averaged, measured and clipped as a whole.

A norm of what one rank holds is no norm of the model, and ranks that scale by different numbers part without a word. So packages that cut
a model guard the gradients of its parts (`PartGradient`): what would take their norm, as torch's `clip_grad_norm_` does, is refused and says
which function to call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm.collectives import ReduceOp, all_reduce
from ds_comm.groups import Group, world_group
from ds_comm.reduction_group import param_sharding
from ds_config.errors import PlanError, ShardedAccessError

__all__ = [
    "PartGradient",
    "average_families",
    "average_gradients",
    "clip_gradients",
    "family_holders",
    "gradient_norm",
    "guard_gradient",
    "guard_gradients",
    "refuse_dtensors",
]

_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm", "_foreach_norm", "dot", "vdot"}
_COPIES = {"clone", "detach"}  # by which optimizers begin a state, which is saved: a plain tensor
_BUCKET = 1 << 24  # elements that one all-reduce carries
_EPSILON = 1e-6  # torch's


class PartGradient(Tensor):
    """The gradient of one part of a model, on a rank that does not hold the others. A plain tensor but for its norm.

    What is computed of a part of a tensor, and has as many elements, is such a part, too: optimizers that take norms of momenta (Muon, LBFGS) would
    step each part by its own.

    Attributes:
        advice: What to call instead of a norm of this rank's part.
        whole: Whether the tensor itself is whole, and only others of the model are elsewhere (experts, stages).
    """

    advice: str
    whole: bool

    def to_local(self) -> Tensor:
        """Return this rank's elements as a plain tensor in the same memory, of which a norm may be taken."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NORMS:
            values = args[0] if args and isinstance(args[0], list | tuple) else args
            part = next((value for value in values if isinstance(value, PartGradient)), None)
            if part is not None:
                raise ShardedAccessError(
                    f"{name} of a gradient of shape {tuple(part.shape)}, which is one part of a model whose other parts are on other ranks: "
                    "every rank would scale by another number",
                    code="comm-part-norm",
                    fix=part.advice,
                )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in _COPIES:
            return result
        values = args[0] if name == "cat" else args
        source = next((value for value in values if isinstance(value, PartGradient)), None)
        if source is not None and not source.whole and type(result) is Tensor and result.numel() >= source.numel() > 1:
            return _part(result, source.advice, False)
        return result


def _part(tensor: Tensor, advice: str, whole: bool) -> PartGradient:
    part = tensor.as_subclass(PartGradient)
    part.advice, part.whole = advice, whole
    return part


def guard_gradient(param: Tensor, advice: str, whole: bool = True) -> None:
    """Make the gradient of `param`, if it is a plain tensor, a `PartGradient` in the same memory; `whole`: the parameter is a tensor of the model, not a part."""
    if type(param.grad) is Tensor:
        param.grad = _part(param.grad, advice, whole)


def guard_gradients(params: Iterable[Tensor], advice: str, whole: bool = True) -> list[RemovableHandle]:
    """Guard the gradients of `params` after every backward, by hooks."""

    def guard(param: Tensor) -> None:
        guard_gradient(param, advice, whole)

    return [param.register_post_accumulate_grad_hook(guard) for param in params if param.requires_grad]


def average_families(params: Sequence[nn.Parameter], dense: Group) -> None:
    """Average gradients over the ranks that hold the same parameters. Collective over these ranks, once after the last backward.

    Args:
        params: In one order on all ranks; those with a family are summed over its group and divided by its divisor.
        dense: The ranks over which all others are averaged.
    Raises:
        PlanError: a parameter is a DTensor, whose ranks have other elements of it ("comm-dtensor").
    """
    refuse_dtensors(
        params,
        "ranks average the gradients of what they hold alike",
        "FSDP2 averages the gradients of its own parameters: call this before fully_shard, or not at all.",
    )
    by_group: dict[tuple[tuple[int, ...], int], tuple[Group, list[nn.Parameter]]] = {}
    for param in params:
        family = param_sharding(param).family
        group, divisor = (dense, dense.size) if family is None else (family.group, family.divisor)
        by_group.setdefault((group.ranks, divisor), (group, []))[1].append(param)
    # In one order everywhere, so that ranks of overlapping groups do not wait for each other.
    for (ranks, divisor), (group, members) in sorted(by_group.items(), key=lambda item: (-len(item[0][0]), item[0])):
        del ranks
        average_gradients(members, group, divisor)


def refuse_dtensors(params: Iterable[Tensor], what: str, fix: str) -> None:
    """Raise PlanError ("comm-dtensor") if one of `params` is a DTensor, of which each rank of a mesh has its elements."""
    part: Any = next((param for param in params if hasattr(param, "device_mesh")), None)
    if part is not None:
        raise PlanError(
            f"{what}, and a parameter of shape {tuple(part.shape)} is a DTensor with placements {part.placements} on {part.device_mesh}",
            code="comm-dtensor",
            fix=fix,
        )


def _elements(grad: Any) -> Tensor:
    """Return this rank's elements of a gradient, of a DTensor or a `PartGradient`, too."""
    elements: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return elements


def _copies(grad: Any, holders: int) -> int:
    """Count the ranks with the same elements of a gradient: of a DTensor those along the mesh dims that it is replicated on."""
    if not hasattr(grad, "device_mesh"):
        return holders
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def average_gradients(params: Sequence[nn.Parameter], group: Group, divisor: int) -> None:
    """Sum gradients over `group` and divide them. A parameter that no rank has a gradient of keeps none. Collective over `group`."""
    if group.size == 1 and divisor == 1:
        return
    for bucket in _buckets([param for param in params if param.requires_grad]):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        present = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device)
        flat = torch.cat([present, *(grad.reshape(-1) for grad in grads)])
        all_reduce(flat, group=group, unit="gradients")
        used = flat[: len(bucket)].tolist()
        if divisor > 1:
            flat /= divisor
        at = len(bucket)
        for param, grad, count in zip(bucket, grads, used, strict=True):
            if count:
                param.grad = grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()


def _buckets(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        by_dtype.setdefault((param.dtype, param.device), []).append(param)
    for members in by_dtype.values():
        bucket: list[nn.Parameter] = []
        elements = 0
        for param in members:
            if bucket and elements + param.numel() > _BUCKET:
                yield bucket
                bucket, elements = [], 0
            bucket.append(param)
            elements += param.numel()
        yield bucket


def gradient_norm(
    params: Sequence[nn.Parameter], holders: Callable[[nn.Parameter], int], norm_type: float = 2.0
) -> Tensor:
    """Compute the norm of all gradients of the whole model, the same on all ranks. Collective over the world.

    Args:
        params: This rank's, each once. Of a DTensor ranks outside its mesh are taken to hold another part.
        holders: Of a parameter that is no DTensor, how many ranks of the world hold it with equal gradients, this one included.
        norm_type: 2 or infinity.
    Returns:
        A float64 scalar.
    Raises:
        PlanError: another order ("comm-norm-type").
    """
    if norm_type not in (2.0, math.inf):
        raise PlanError(
            f"a norm of order {norm_type} over parts of a model", code="comm-norm-type", fix="Use norm_type 2 or inf."
        )
    device = params[0].device if params else torch.device("cpu")
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for param in params:
        if param.grad is None:
            continue
        grad = _elements(param.grad)
        if not grad.numel():
            continue
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).to(device)
        total = (
            total + norm.square() / _copies(param.grad, holders(param))
            if norm_type == 2.0
            else torch.maximum(total, norm)
        )
    all_reduce(total, ReduceOp.SUM if norm_type == 2.0 else ReduceOp.MAX, world_group(), unit="gradient norm")
    return total.sqrt()[0] if norm_type == 2.0 else total[0]


def clip_gradients(params: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients as torch's `clip_grads_with_norm_` does, by one number for the whole model."""
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            _elements(param.grad).mul_(factor.to(param.grad.device, param.grad.dtype))


def family_holders(param: nn.Parameter, dense: int) -> int:
    """Count the ranks with equal gradients of `param`: by its family; `dense` ranks without one."""
    family = param_sharding(param).family
    return dense if family is None else family.group.size * family.copies
