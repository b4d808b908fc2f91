"""Compression: layers see quantised and pruned weights while they are trained; the schedule goes on with the updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ds_compress import CompressionScheduler, compress, is_compressed
from ds_compress.compress import layers_of
from ds_compress.config import CompressionConfig, EigenvalueConfig
from ds_compress.recipe import CompressionRecipe, make_recipe
from ds_compress.students import is_student, is_teacher
from ds_config.errors import PlanError, UnsupportedError
from ds_engine.transforms.transform import BuildContext, Transform, TransformInput

__all__ = ["CompressionTransform"]


@dataclass(frozen=True, slots=True)
class Compressing:
    """What is asked for: the section, with `quantize_training` in it; and whether the model is compressed already."""

    section: CompressionConfig
    eigenvalue: EigenvalueConfig
    already: bool


class CompressionTransform(Transform[Compressing, nn.Module | None]):
    """In the plan if the configuration says so, or the model went through `init_compression`."""

    name = "compression"

    def decide(self, inputs: TransformInput) -> Compressing | None:
        section, quantize = inputs.config.compression_training, inputs.config.quantize_training
        already = any(module.name.rpartition(".")[2] == "compression" for module in inputs.shapes.modules)
        if quantize.enabled:
            if section.weight_quantization.enabled:
                raise PlanError(
                    "quantize_training and compression_training.weight_quantization both quantise weights",
                    code="compress-twice",
                    fix="Keep one; quantize_training is weight_quantization of all layers.",
                )
            weights = quantize.as_compression().weight_quantization
            section = section.model_copy(update={"weight_quantization": weights})
        if not (section.enabled or section.layer_reduction.enabled or already):
            return None
        if quantize.enabled and quantize.eigenvalue.enabled:
            raise UnsupportedError(
                "quantize_training.eigenvalue is enabled: eigenvalues need second derivatives of the loss, which sharded "
                "backwards do not give",
                code="compress-eigenvalue",
                fix="Call ds_compress.block_eigenvalues on the model before it is sharded, and slow_down with what it returns.",
            )
        cut = [axis for axis in ("tensor", "pipe", "expert") if getattr(inputs.mesh, axis) > 1]
        if cut:
            raise UnsupportedError(
                f"compression of a model whose layers are cut over ranks ({', '.join(cut)}): groups, rows and heads of a "
                "part are not those of the whole",
                code="compress-degrees",
                fix="Leave these degrees at 1, or compress a model whose layers are parallel by themselves (Megatron's).",
            )
        return Compressing(section, quantize.eigenvalue, already)

    def plan_rows(self, what: Compressing) -> Mapping[str, str]:
        if what.already:
            return {"compression": "as init_compression left the model"}
        return {"compression": _told(what.section)}

    def apply(self, what: Compressing, site: BuildContext) -> nn.Module | None:
        model, section = site.model, what.section
        if not is_compressed(model) and is_teacher(model):
            return None  # programs give a teacher's engine the configuration of its student
        if section.layer_reduction.enabled and not is_student(model):
            raise PlanError(
                "compression_training.layer_reduction is enabled, and no layers of a teacher were copied",
                code="compress-teacher",
                fix="Call init_compression(model, config, teacher_model=...) before initialize().",
            )
        ours = not is_compressed(model)
        if ours:
            recipe = make_recipe(section, layers_of(model))
            _scores_are_trained(recipe, site)
            compress(model, recipe)
        site.followers.append(CompressionScheduler(model, group=site.mesh["gradient"]))
        return model if ours else None

    def undo(self, applied: nn.Module | None) -> None:
        del applied  # A trained model stays compressed: redundancy_clean makes it final.


def _told(section: CompressionConfig) -> str:
    words = []
    for name in type(section).model_fields:
        technique = getattr(section, name)
        if technique.enabled and name != "layer_reduction":
            shared = technique.shared_parameters
            words.append(f"{name.replace('_', ' ')} from step {shared.schedule_offset} on")
    return "; ".join(words) or "a student of fewer layers"


def _scores_are_trained(recipe: CompressionRecipe, site: BuildContext) -> None:
    pruned = (p for r in recipe.layers.values() for p in (r.sparse, r.rows, r.heads, r.channels) if p is not None)
    preselected = site.parts.params is not None or isinstance(site.parts.optimizer, torch.optim.Optimizer)
    if preselected and any(p.method == "topk" for p in pruned):
        raise PlanError(
            "pruning by learnt scores (method topk) adds parameters, and the optimizer's were chosen before",
            code="compress-scores",
            fix="Call init_compression on the model first, then choose the parameters, then initialize().",
        )
