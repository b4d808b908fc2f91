"""Gradients of a model that tensor parallelism has cut, in a loop without an engine: between the last backward and the step.

loss.backward()
reduce_gradients(model, mesh)
clip_grad_norm_(model, 1.0)
optimizer.step()
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_comm import Mesh, param_sharding, world_group
from ds_comm.part_gradients import average_families, clip_gradients, family_holders, gradient_norm
from ds_config.errors import PlanError
from ds_parallel.tensor.apply import TensorParallelModel, tensor_parallel_of

__all__ = ["clip_grad_norm_", "reduce_gradients"]


def reduce_gradients(model: nn.Module | TensorParallelModel, mesh: Mesh | None = None) -> None:
    """Average gradients over the ranks that the batch is split over and that hold the same parts.

    Once after the last backward of a step. Does nothing where the model is a DDP, which has averaged them.

    Args:
        model: As `parallelize_model` cut it.
        mesh: Of which the model was cut over `mesh["tensor"]`; not needed where these are all ranks, or after `assign(data, divisor)`.
    Raises:
        PlanError: there is no mesh, and nobody said which ranks hold the same parts ("tensor-gradients").
    Collective over the world.
    """
    if isinstance(model, DistributedDataParallel):
        return
    module, cut = _unwrapped(model)
    params = list(module.parameters())
    assigned = all(param_sharding(param).family is not None for param in params)
    if mesh is None and not assigned and cut.group.size < world_group().size:
        raise PlanError(
            f"gradients of a model cut over {cut.group.size} of {world_group().size} ranks, and nobody said which ranks hold the same parts",
            code="tensor-gradients",
            fix="Pass the mesh: reduce_gradients(model, mesh).",
        )
    if assigned or mesh is not None:
        average_families(params, cut.group if mesh is None else mesh["gradient"])


def clip_grad_norm_(model: nn.Module | TensorParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip by the norm of the whole model's gradients, each part counted once; returns the norm before. After they are averaged.

    Args:
        norm_type: 2 or infinity.
    Collective over the world, which are the tensor-parallel ranks and their copies (with stages: `ds_pipe.clip_grad_norm_`).
    """
    module, cut = _unwrapped(model)
    sharers = {id(held.param): len(held.cut.sharers(held.part, cut.group.rank)) for held in cut.shards.values()}
    copies = world_group().size // cut.group.size

    def holders(param: nn.Parameter) -> int:
        return family_holders(param, copies * sharers.get(id(param), cut.group.size))

    params = list(module.parameters())
    norm = gradient_norm(params, holders, norm_type)
    clip_gradients(params, norm, max_norm)
    return norm


def _unwrapped(model: nn.Module | TensorParallelModel) -> tuple[nn.Module, TensorParallelModel]:
    cut = model if isinstance(model, TensorParallelModel) else tensor_parallel_of(model)
    if cut is None:
        raise PlanError(
            f"{type(model).__name__} is not cut over ranks",
            code="tensor-gradients",
            fix="Call ds_parallel.tensor.parallelize_model first; torch's own functions are right for a model that is whole.",
        )
    return (model if isinstance(model, nn.Module) else cut.model), cut
