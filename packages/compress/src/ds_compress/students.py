"""Layer reduction: a student with fewer layers starts from some of its teacher's."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ds_compress.config import CompressionConfig, compression_of
from ds_config.config_file import Source
from ds_config.errors import PlanError

__all__ = ["convert_conv1d_to_linear", "is_student", "is_teacher", "student_initialization", "teaches"]

_students: WeakSet[nn.Module] = WeakSet()
_teachers: WeakSet[nn.Module] = WeakSet()


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Source | CompressionConfig
) -> nn.Module:
    """Copy layers of a teacher into a student: layer `teacher_layer[i]` into layer i, and `other_module_name` as they are.

    Args:
        student_model: Built with fewer layers; its other shapes are the teacher's.
        teacher_model: Whole, on any device. It is not changed.
        deepspeed_config: A configuration whose `layer_reduction` says which.
    Raises:
        PlanError: a name is not in a model, or shapes differ ("compress-student"); nothing was copied.
    """
    section = compression_of(deepspeed_config).layer_reduction
    prefix = section.module_name_prefix or ""
    pairs = [(f"{prefix}.{new}", f"{prefix}.{old}") for new, old in enumerate(section.teacher_layer)]
    pairs += [(name, name) for name in section.other_module_name]
    copies = []
    for new, old in pairs:
        student_values, other = _values(student_model, new, "student"), _values(teacher_model, old, "teacher")
        wrong = [
            n
            for n in student_values.keys() | other.keys()
            if n not in student_values or n not in other or student_values[n].shape != other[n].shape
        ]
        if wrong:
            raise PlanError(
                f"{new} of the student and {old} of the teacher differ in {', '.join(sorted(wrong)[:3])}",
                code="compress-student",
                fix="Build the student as the teacher, only with fewer layers.",
            )
        copies += [(student_values[n], other[n]) for n in student_values]
    layers = _module(student_model, prefix, "student")
    if isinstance(layers, nn.ModuleList | nn.Sequential) and len(layers) != len(section.teacher_layer):
        raise PlanError(
            f"the student has {len(layers)} layers, teacher_layer names {len(section.teacher_layer)}",
            code="compress-student",
            fix="Build the student with as many layers as teacher_layer names.",
        )
    with torch.no_grad():
        for into, value in copies:
            into.copy_(value)
    _students.add(student_model)
    teaches(teacher_model)
    return student_model


def is_student(model: nn.Module) -> bool:
    """Whether layers of a teacher were copied into it."""
    return model in _students


def teaches(model: nn.Module) -> None:
    """Remember that a model is a teacher: an engine of it leaves its layers as they are, whatever its configuration says."""
    _teachers.add(model)


def is_teacher(model: nn.Module) -> bool:
    """Whether a student was made for it by `init_compression` or `student_initialization`."""
    return model in _teachers


def _module(model: nn.Module, name: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(n for n, _ in model.named_children())
        raise PlanError(
            f"layer_reduction: the {whose} has no module {name!r} (it has {known})",
            code="compress-student",
            fix="Use names from the model's outermost module.",
        ) from None


def _values(model: nn.Module, name: str, whose: str) -> dict[str, torch.Tensor]:
    module = _module(model, name, whose)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module] | None = None) -> nn.Module:
    """Put a `Linear` in the place of each transposed one, as GPT-2 of transformers has them. Changes the model; returns it.

    Args:
        convert_type: The class of those; by default every class called Conv1D with a weight [in, out].
    """

    def transposed(module: nn.Module) -> bool:
        return isinstance(module, convert_type) if convert_type is not None else type(module).__name__ == "Conv1D"

    if transposed(model):
        return _linear(model)
    for outer in list(model.modules()):
        for name, child in list(outer.named_children()):
            if transposed(child):
                setattr(outer, name, _linear(child))
    return model


def _linear(old: Any) -> nn.Linear:
    inputs, outputs = old.weight.shape
    linear = nn.Linear(inputs, outputs, old.bias is not None, device="meta", dtype=old.weight.dtype)
    linear.weight = nn.Parameter(old.weight.detach().t().contiguous(), requires_grad=old.weight.requires_grad)
    linear.bias = old.bias
    return linear.train(old.training)
