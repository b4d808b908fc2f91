"""Tensor parallelism whose parameters are DTensors, as torch's `parallelize_module` makes them.

mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"])
fully_shard(model, mesh=mesh["dp"])                             # then DCP, torch's clip_grad_norm_ and optimizers

Layers compute as those of `parallelize_model` do, with plain tensors: while a module runs, its DTensors are hidden by their local elements. A
parameter that is cut has the placement `Shard(dim)`, all others `Replicate()`, so that all are on one mesh and a norm counts each element once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ds_comm import Group, as_group
from ds_comm.ddp import mark_unlike
from ds_comm.differentiable import reduce
from ds_config.errors import PlanError, UnsupportedError
from ds_parallel.tensor.apply import Held, TensorParallelModel, parallelize_model
from ds_parallel.tensor.module_info import facts_of
from ds_parallel.tensor.tp_plan import TensorOptions, TensorPlan, make_tensor_plan

__all__ = ["parallelize_module"]


@dataclass(frozen=True, slots=True, eq=False)
class _DTensorLayout:
    """What a parameter is as a DTensor.

    Attributes:
        shape: Of all ranks' parts together.
        placement: On the one dim of the mesh.
        summed: Its gradient is a part of the whole one on every rank, by a rule of the plan.
    """

    mesh: DeviceMesh
    group: Group
    shape: tuple[int, ...]
    placement: Placement
    summed: bool = False

    def wrap(self, local: Tensor) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [self.placement], run_check=False, shape=torch.Size(self.shape), stride=stride
        )


def parallelize_module(module: nn.Module, device_mesh: DeviceMesh, plan: TensorPlan | None = None) -> nn.Module:
    """Cut `module` in place over a device mesh of one dim, with DTensors as parameters; returns it.

    A parameter of several parts (a fused QKV) becomes one DTensor a part, `weight_0`, ...

    Args:
        module: With equal values on every rank, before `fully_shard` and before the optimizer is made. It may be on meta.
        device_mesh: Of one dim, `mesh["tp"]`.
        plan: By default the rules of the model's family.
    Raises:
        PlanError: see `parallelize_model` and `make_tensor_plan`; a mesh of several dims ("tensor-dtensor").
        UnsupportedError: ranks would share a part or have parts of a width that `Shard` does not have ("tensor-dtensor"). Nothing was changed.
    """
    if device_mesh.ndim != 1:
        raise PlanError(
            f"tensor parallelism is over one dim of a mesh, this one has {device_mesh.ndim}",
            code="tensor-dtensor",
            fix='Pass one dim: parallelize_module(model, mesh["tp"]).',
        )
    group = as_group(device_mesh.get_group())
    plan = make_tensor_plan(facts_of(module), TensorOptions(group.size)) if plan is None else plan
    _check_cuts(plan)
    cut = parallelize_model(module, plan, group)
    _to_dtensors(module, cut, device_mesh)
    return module


def _check_cuts(plan: TensorPlan) -> None:
    for decision in plan.cut:
        for key, shards in decision.cuts.items():
            for stretches in shards.parts:
                start, length = stretches[0][0], stretches[-1][1] - stretches[0][0]
                chunk = -(-length // plan.degree)
                bounds = [start + min(rank * chunk, length) for rank in range(plan.degree + 1)]
                wanted = tuple(itertools.pairwise(bounds))
                if tuple(stretches) != wanted:
                    raise UnsupportedError(
                        f"{decision.name}.{key} is cut into {list(stretches)} along dim {shards.dim}, and a DTensor's Shard would cut it into {list(wanted)}",
                        code="tensor-dtensor",
                        fix="Use parallelize_model, whose parts may be shared and uneven, or a number of ranks that divides the heads.",
                    )


def _to_dtensors(model: nn.Module, cut: TensorParallelModel, mesh: DeviceMesh) -> None:
    cut.release_parts()
    summed = {
        id(param)
        for decision in cut.plan.decisions
        if decision.sum_gradient
        for param in model.get_submodule(decision.name).parameters(recurse=False)
    }
    held = {id(shard.param): shard for shard in cut.shards.values()}
    done: dict[int, nn.Parameter] = {}
    layouts: dict[int, _DTensorLayout] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in done:
                layout = _layout(mesh, cut.group, param, held.get(id(param)), id(param) in summed)
                made = nn.Parameter(layout.wrap(param.detach()), requires_grad=param.requires_grad)
                if isinstance(layout.placement, Shard):
                    mark_unlike([made], (rank for rank in cut.group.ranks if rank != cut.group.ranks[cut.group.rank]))
                done[id(param)], layouts[id(made)] = made, layout
            module._parameters[name] = done[id(param)]
    for module in model.modules():
        own = {name: layouts[id(param)] for name, param in module._parameters.items() if param is not None}
        if own:
            view = _LocalView(own)
            module.register_forward_pre_hook(view.show)
            module.register_forward_hook(view.hide, always_call=True)


def _layout(mesh: DeviceMesh, group: Group, param: nn.Parameter, part_of: Held | None, summed: bool) -> _DTensorLayout:
    if part_of is None:
        return _DTensorLayout(mesh, group, tuple(param.shape), Replicate(), summed)
    stretches, dim = part_of.cut.parts[part_of.part], part_of.cut.dim
    shape = [*param.shape]
    shape[dim] = stretches[-1][1] - stretches[0][0]
    return _DTensorLayout(mesh, group, tuple(shape), Shard(dim))


class _LocalView:
    """Hides the DTensors of a module by their local elements while the module runs."""

    def __init__(self, layouts: Mapping[str, _DTensorLayout]) -> None:
        self.layouts = dict(layouts)

    def show(self, module: nn.Module, args: Any) -> None:
        for name, layout in self.layouts.items():
            param = module._parameters.get(name)
            if isinstance(param, DTensor):  # FSDP2 puts its own in the place of ours
                module.__dict__[name] = _Local.apply(param, layout)

    def hide(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in self.layouts:
            module.__dict__.pop(name, None)


class _Local(torch.autograd.Function):
    """A DTensor's local elements; the gradient is a DTensor of the same placement.

    `tensor_part` of its node says `PartialGradients` whether the gradient is right as it comes.
    """

    @staticmethod
    def forward(ctx: Any, param: DTensor, layout: _DTensorLayout) -> Tensor:
        ctx.layout = layout
        ctx.tensor_part = layout.summed or isinstance(layout.placement, Shard)
        return param.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        layout: _DTensorLayout = ctx.layout
        grad = grads[0].contiguous()
        return layout.wrap(reduce(grad, layout.group, unit="partial gradient") if layout.summed else grad), None
