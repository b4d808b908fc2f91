"""Tensor parallelism: layers are cut over the ranks of the tensor axis, as a family's rules or the user's say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_comm import Group, param_sharding
from ds_comm.broadcast_state import make_same
from ds_config.errors import UnsupportedError
from ds_engine.plan import Shapes
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_parallel.tensor import TensorParallelModel, TensorPlan, make_tensor_plan, parallelize_model
from ds_parallel.tensor.sharded_linear import ShardedLinear
from ds_zero.layout.units import ParamInfo
from ds_zero.runtime.init_shards import is_scattered, take_over

__all__ = ["Tensor"]


class Tensor(Transform[TensorPlan, TensorParallelModel]):
    """Of the model as it is; a degree of 1 is not in the plan."""

    name = "tensor parallel"
    axes = ("tensor",)

    def decide(self, inputs: TransformInput) -> TensorPlan | None:
        section = inputs.config.tensor_parallel
        if section is None or section.megatron_layers or inputs.mesh.tensor == 1:
            return None
        if inputs.shapes.facts is None:
            raise UnsupportedError(
                "tensor parallelism is planned from a model's modules; the names in weight files do not say what they are",
                code="plan-model",
                fix="Name the model by its config.json or by a function that makes it.",
            )
        experts = inputs.config.expert_parallel
        options = replace(section.options, experts=experts is None or not experts.enabled)
        return make_tensor_plan(inputs.shapes.facts, options)

    def plan_rows(self, what: TensorPlan) -> Mapping[str, str]:
        local_numel, total = what.numel(0)
        traffic = what.traffic()
        sums = f"sums of {traffic.forward:,} elements a token forward, {traffic.backward:,} backward"
        return {
            "tensor parallel": f"{len(what.cut)} layers over {what.degree} ranks, rank 0 holds {local_numel:,} of {total:,}; {sums}",
            "layers": "\n".join(str(what).splitlines()[1:]),
        }

    def shapes(self, what: TensorPlan, shapes: Shapes) -> Shapes:
        cuts = {f"{d.name}.{key}": cut for d in what.cut for key, cut in d.cuts.items()}

        def parts(info: ParamInfo) -> Iterator[ParamInfo]:
            cut = cuts.get(info.name)
            if cut is None:
                yield info
                return
            several = len(cut.parts) > 1
            for index, (start, stop) in enumerate(cut.stretches(0)):
                shape = (*info.shape[: cut.dim], stop - start, *info.shape[cut.dim + 1 :])
                yield replace(info, name=f"{info.name}_{index}" if several else info.name, shape=shape)

        return replace(shapes, params=tuple(part for info in shapes.params for part in parts(info)))

    def apply(self, what: TensorPlan, site: BuildContext) -> TensorParallelModel:
        _make_same(site.model, site.mesh["tensor"])
        parallel_model = parallelize_model(site.model, what, site.mesh["tensor"], take=take_over)
        for param in site.model.parameters():  # `Init` has sharded them over tensor ranks, too
            take_over(param)
        section = site.plan.config.tensor_parallel
        if section is not None and section.vocab_parallel_lm_head:
            try:
                parallel_model.use_cut_logits()
            except UnsupportedError:
                parallel_model.undo()
                raise
        gradient = site.mesh["gradient"]
        parallel_model.assign(gradient, gradient.size)
        _follow(parallel_model, site)
        return parallel_model

    def undo(self, applied: TensorParallelModel) -> None:
        applied.undo()


def _make_same(model: nn.Module, group: Group) -> None:
    """Make whole parameters and buffers those of the first tensor rank: a program that has no seed gives each rank others."""
    parts = {
        id(param)
        for module in model.modules()
        if isinstance(module, ShardedLinear)
        for param in module.parameters(recurse=False)
        if module.sharded_dim(param) is not None
    }
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not (t.is_meta or is_scattered(t))]
    known = [(tensor, param_sharding(tensor)) for tensor in tensors if id(tensor) not in parts]
    make_same([tensor for tensor, what in known if what.family is None and what.box is None], group)


def _follow(parallel_model: TensorParallelModel, site: BuildContext) -> None:
    """Replace parameters in the caller's optimizer and groups by the shards they were split into."""
    if not parallel_model.replaced:
        return

    def parts(params: Any) -> list[nn.Parameter]:
        return [part for param in params for part in parallel_model.replaced.get(param, [param])]

    init_args = site.parts
    if isinstance(init_args.optimizer, torch.optim.Optimizer):
        for group in init_args.optimizer.param_groups:
            group["params"] = parts(group["params"])
    if init_args.params is not None:
        listed = list(init_args.params)
        grouped = bool(listed) and isinstance(listed[0], dict)
        params = [{**group, "params": parts(group["params"])} for group in listed] if grouped else parts(listed)
        site.parts = replace(init_args, params=params)
