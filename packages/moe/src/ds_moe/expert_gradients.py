"""Gradients of a model with experts on several ranks, in a loop without an engine: between the last backward and the step.

loss.backward()
reduce_gradients(model, mesh)
clip_grad_norm_(model, 1.0)
optimizer.step()
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_comm import Mesh, world_group
from ds_comm.ddp import reduces_left_out
from ds_comm.part_gradients import average_families, clip_gradients, family_holders, gradient_norm

__all__ = ["clip_grad_norm_", "reduce_gradients"]


def reduce_gradients(model: nn.Module, mesh: Mesh | None = None) -> None:
    """Average gradients as one process would have them: dense ones over the batch ranks, experts over the ranks that hold them.

    Once after the last backward of a step. Does nothing where DDP is around the model, which has averaged all of them.

    Args:
        model: After `place_experts(model, mesh)`.
        mesh: As given there; None: all ranks split the batch.
    Collective over the world.
    """
    if isinstance(model, DistributedDataParallel) or reduces_left_out(model):
        return
    average_families(list(model.parameters()), world_group() if mesh is None else mesh["gradient"])


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip by the norm of the whole model's gradients, each expert counted once; returns the norm before. After they are averaged.

    Args:
        norm_type: 2 or infinity.
    Collective over the world.
    """
    params, world = list(model.parameters()), world_group().size
    norm = gradient_norm(params, lambda param: family_holders(param, world), norm_type)
    clip_gradients(params, norm, max_norm)
    return norm
