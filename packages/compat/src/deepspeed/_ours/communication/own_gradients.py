"""Gradients that a loop of one's own has: their norms (`deepspeed.runtime.utils`), and averages of which each rank gets its part
(`deepspeed.runtime.comm.coalesced_collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed._ours.base.runtime_utils import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    is_model_parallel_parameter,
    total_norm,
)
from deepspeed._ours.communication.expert_getters import _get_max_expert_parallel_group
from deepspeed._ours.communication.group_getters import get_data_parallel_group
from ds_accel import get_accelerator
from ds_comm import ReduceOp, all_reduce, as_group, reduce_scatter_single
from ds_moe.utils import is_moe_param


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Compute the norm of the gradients of unsharded parameters: this rank's, or with `mpu` of its model-parallel ranks. Collective with it.

    `engine.get_global_grad_norm` is the norm of the run.
    """
    return float(_norm(_listed(parameters), float(norm_type), mpu))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Clip gradients in place by their norm: the mean over the data-parallel ranks, whose experts may differ. Collective.

    The engine clips by `gradient_clipping` itself. Squares are summed in fp64.

    Args:
        mpu: Another library's groups: the norm is of the parameters of all model-parallel ranks, those on each of them counted once.
    Returns:
        The norm before clipping, the same on the data-parallel ranks.
    """
    params = _listed(parameters)
    norm = _norm(params, float(norm_type), mpu)
    if dist.is_initialized():
        ranks = as_group(get_data_parallel_group())
        norm /= ranks.size
        all_reduce(norm, group=ranks)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm.float()


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [param for param in listed if param.grad is not None]


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Compute the norm of tensors: this rank's, or with `mpu` of its model-parallel ranks. Collective with it.

    A norm that is not finite is -1, which `CheckOverflow.check_using_norm` knows.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = float(_norm(listed, float(norm_type), mpu, Tensor.detach))
    return norm if math.isfinite(norm) else -1.0


def _norm(
    params: list[Tensor], norm_type: float, mpu: Any, of: Callable[[Tensor], Tensor] = attrgetter("grad")
) -> Tensor:
    group = bwc_tensor_model_parallel_group(mpu)
    first = group is None or bwc_tensor_model_parallel_rank(mpu) == 0
    norm = total_norm([of(p) for p in params if first or is_model_parallel_parameter(p)], norm_type)
    if params:
        norm = norm.to(params[0].device)
    if group is None:
        return norm
    if norm_type == torch.inf:
        all_reduce(norm, ReduceOp.MAX, as_group(group))
        return norm
    power = norm**norm_type
    all_reduce(power, group=as_group(group))
    return power ** (1.0 / norm_type)


class CheckOverflow:
    """Whether gradients that a loop of one's own has are not finite on any rank that shares them. Collective there.

    Args:
        param_groups: Lists of parameters.
        mpu: Another library's groups: the model-parallel ranks are asked, too.
        zero_reduce_scatter: Whether each rank has other elements of the gradients: all ranks are asked.
        deepspeed: The engine; of no meaning here, since its backwards reduce.
    """

    def __init__(
        self, param_groups: Iterable[Iterable[Tensor]] | None = None, mpu: Any = None, zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:  # fmt: skip
        del deepspeed
        self.mpu, self.zero_reduce_scatter = mpu, zero_reduce_scatter
        self.params = [param for group in param_groups or () for param in group]
        self.has_moe_params = any(map(is_moe_param, self.params))

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient of `param_groups`, by default those of the constructor, is not finite."""
        params = self.params if param_groups is None else [param for group in param_groups for param in group]
        return self.has_overflow(params, any(map(is_moe_param, params)))

    def check_using_norm(self, norm_group: Iterable[float | Tensor], reduce_overflow: bool = True) -> bool:
        """Whether a norm is not finite, or -1, which stands for that."""
        norms = [float(norm) for norm in norm_group]
        found = not all(math.isfinite(norm) and norm != -1 for norm in norms)
        return self._anywhere(found, self.has_moe_params, reduce_overflow and self.mpu is None)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether this rank has a gradient that is not finite."""
        return any(param.grad is not None and not bool(torch.isfinite(param.grad).all()) for param in params)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether any rank that shares `params` has a gradient that is not finite."""
        experts = self.has_moe_params if has_moe_params is None else has_moe_params
        return self._anywhere(self.has_overflow_serial(params), experts, self.zero_reduce_scatter)

    def _anywhere(self, overflow: bool, experts: bool, everywhere: bool) -> bool:
        group = bwc_tensor_model_parallel_group(self.mpu)
        asked = [_get_max_expert_parallel_group()] if experts else []
        asked += [None] if everywhere else [group] if group is not None else []
        flag = torch.tensor(float(overflow), device=get_accelerator().device())
        for ranks in asked:
            all_reduce(flag, ReduceOp.MAX, as_group(ranks))
        return bool(flag)


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Reduce-scatter the average of every rank's `tensors`. Collective.

    The shards are flat and in order; the last ranks' shards may be shorter.
    """
    ranks = as_group(group)
    shards = []
    for tensor in tensors:
        part = -(-tensor.numel() // ranks.size)
        padded = nn.functional.pad(tensor.reshape(-1) / ranks.size, (0, part * ranks.size - tensor.numel()))
        out = padded.new_empty(part)
        reduce_scatter_single(out, padded, group=ranks)
        shards.append(out[: max(0, min(part, tensor.numel() - ranks.rank * part))])
    return shards


def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """`reduce_scatter_coalesced` over all ranks: exact, as upstream's for tensors that cannot be coded. Collective."""
    del groups
    return reduce_scatter_coalesced(tensors)


def all_to_all_loco_quant_reduce(
    params: Sequence[nn.Parameter], groups: Mapping[str, Any], loco_param: Any = None
) -> list[Tensor]:
    """Reduce-scatter the average of gradients, exact: without rounding there is no error to feed back. Collective."""
    del loco_param
    return all_to_all_quant_reduce([param.grad for param in params if param.grad is not None], groups)
