"""Expert parallelism: blocks with experts are recognised and cut over ranks; MoE layers that were built for several ranks get their groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_config.errors import PlanError
from ds_engine.plan import Shapes
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput
from ds_moe import ExpertParallelModel, ExpertPlacement, apply_expert_parallel, place_experts, report_load
from ds_moe.config import ExpertParallelConfig
from ds_monitor import current_step
from ds_zero.layout.units import ParamInfo
from ds_zero.runtime.init_shards import take_over

__all__ = ["ExpertTransform"]

# Packed weights [E, ...] of transformers 5, or one of a list of experts. Own names of a user's blocks are not known before the model is.
_EXPERT = re.compile(r"(^|\.)experts\.(?:(?P<packed>(?:gate_up|up|down)_proj(?:_bias)?)|(?P<number>\d+)\.[\w.]+)$")


@dataclass(frozen=True, slots=True)
class Spread:
    """How experts are spread.

    Attributes:
        degree: Ranks that share one copy of all experts; 1 with `section` None for layers that say it themselves.
        section: What is to be cut; None: nothing is.
        data_first: Ranks with the same experts are neighbours.
        layers: MoE layers of the model's own, by name.
        numel: Elements of experts that were found by name, on all ranks together.
        copies: Ranks that hold the same experts.
    """

    degree: int
    section: ExpertParallelConfig | None
    data_first: bool
    layers: tuple[str, ...]
    numel: int
    copies: int


@dataclass(slots=True)
class Made:
    """What was made of it."""

    cut: ExpertParallelModel | None
    placed: ExpertPlacement
    hook: RemovableHandle


class ExpertTransform(Transform[Spread, Made]):
    """In the plan if the configuration says so, or the model has MoE layers."""

    name = "expert parallel"
    axes = ("expert",)

    def decide(self, inputs: TransformInput) -> Spread | None:
        section = inputs.config.expert_parallel
        section = section if section is not None and section.enabled else None
        layers = tuple(m.name for m in inputs.shapes.modules if m.name.split(".")[-1] == "deepspeed_moe")
        if section is None and not layers:
            return None
        degree = 1 if section is None else section.autoep_size
        expert_params = [(param, count) for param in inputs.shapes.params if (count := _experts(param, inputs.shapes))]
        if section is not None:
            for param, count in expert_params:
                if count % degree:
                    raise PlanError(
                        f"{param.name} is of {count} experts, expert_parallel.autoep_size is {degree}",
                        code="moe-places",
                        fix="Use an autoep_size that divides the number of experts.",
                    )
        numel = sum(param.numel for param, _ in expert_params) if section is not None else 0
        first = inputs.config.use_data_before_expert_parallelism
        return Spread(degree, section, first, layers, numel, inputs.mesh.expert_data)

    def plan_rows(self, what: Spread) -> Mapping[str, str]:
        rows = {}
        if what.section is not None:
            rows["experts"] = (
                f"{what.numel:,} elements over {what.degree} ranks, {what.numel // what.degree:,} on each, "
                f"{what.copies} copies; rows of chosen experts are sent both ways, forward and backward"
            )
        if what.layers:
            rows["MoE layers"] = f"{len(what.layers)} of the model's own ({what.layers[0]}, ...)"
        return rows

    def shapes(self, what: Spread, shapes: Shapes) -> Shapes:
        if what.section is None or what.degree == 1:
            return shapes
        params = []
        for param in shapes.params:
            count = _experts(param, shapes)
            if not count:
                params.append(param)
                continue
            match = _EXPERT.search(param.name)
            number = None if match is None else match["number"]
            if number is None:
                params.append(
                    replace(param, shape=(count // what.degree, *param.shape[1:]), family=f"expert{what.degree}")
                )
            elif int(number) < count // what.degree:
                params.append(replace(param, family=f"expert{what.degree}"))
        return replace(shapes, params=tuple(params))

    def apply(self, what: Spread, site: BuildContext) -> Made:
        cut = None
        if what.section is not None:
            required = site.mesh["pipe"].size == 1  # a stage may have no experts
            cut = apply_expert_parallel(
                site.model, what.section, site.mesh, data_first=what.data_first, required=required, take=take_over
            )
        placed = place_experts(site.model, site.mesh, data_first=what.data_first)
        return Made(cut, placed, site.model.register_forward_pre_hook(_Reporting()))

    def undo(self, applied: Made) -> None:
        applied.hook.remove()
        applied.placed.close()
        if applied.cut is not None:
            applied.cut.undo()


class _Reporting:
    """Reports the load of experts once a step, with the first forward of the next one."""

    def __init__(self) -> None:
        self._step = current_step()

    def __call__(self, model: nn.Module, args: Any) -> None:
        if self._step != current_step():
            self._step = current_step()
            report_load(model)


def _experts(param: ParamInfo, shapes: Shapes) -> int:
    """Count the experts in the block of an expert parameter; 0 for other parameters."""
    match = _EXPERT.search(param.name)
    if match is None or ".deepspeed_experts." in param.name:
        return 0
    if match["packed"]:
        return param.shape[0] if len(param.shape) >= 2 else 0
    stem = param.name[: match.start("number")]
    return sum(module.name.startswith(stem) and module.name[len(stem) :].isdigit() for module in shapes.modules)
