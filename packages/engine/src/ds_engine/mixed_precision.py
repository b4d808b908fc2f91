"""From the precision sections of the configuration to formats: what ds-zero works with, and what the forward sees. Pure."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ds_config.errors import ConfigError, UnsupportedError
from ds_engine.config import Config
from ds_zero import LossScale, Precision, PrecisionRule
from ds_zero.layout.units import ModuleInfo, ParamInfo
from ds_zero.planning.unit_plan import gradient_text

__all__ = ["Casting", "buffer_note", "casting_of", "low_precision_rules", "precision_of", "precision_text"]

_DTYPES: Mapping[str, torch.dtype] = {
    name: dtype
    for dtype, names in {
        torch.float16: ("fp16", "float16", "half", "torch.float16"),
        torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
        torch.float32: ("fp32", "float32", "torch.float32"),
    }.items()
    for name in names
}


@dataclass(frozen=True, slots=True)
class Casting:
    """What is cast on the way into and through the forward; None leaves it alone.

    Attributes:
        inputs: Floating-point inputs of the model.
        buffers: Floating-point buffers of the model, once.
        autocast: Operations, under torch.autocast.
        fp32_names: Parts of the names of buffers that are fp32 all the same; `*` stands for anything.
        fp32_lists: Attributes of modules with more such names (transformers' own lists).
    """

    inputs: torch.dtype | None = None
    buffers: torch.dtype | None = None
    autocast: torch.dtype | None = None
    fp32_names: tuple[str, ...] = ()
    fp32_lists: tuple[str, ...] = ()

    def keeps_fp32(self, model: nn.Module) -> Callable[[str], bool]:
        """Return whether a buffer of `model`, by its full name, is one of those that stay fp32."""
        starts = [("", name) for name in self.fp32_names]
        for path, module in model.named_modules() if self.fp32_lists else ():
            listed = [name for attribute in self.fp32_lists for name in getattr(module, attribute, None) or ()]
            starts += [(f"{path}." if path else "", name) for name in listed]
        patterns = [re.compile(f"{re.escape(start)}.*{_glob(name)}") for start, name in starts]
        return lambda name: any(pattern.match(name) for pattern in patterns)


def _glob(name: str) -> str:
    return ".*".join(map(re.escape, name.split("*")))


def precision_of(config: Config) -> Precision:
    """Resolve the dtypes of parameters, of gradient reduction and accumulation, of masters, and the loss scale."""
    fp16, bf16, autocast = config.fp16, config.bf16, casting_of(config).autocast
    formats = Precision(
        reduce=_dtype(config.communication_data_type), accumulate=_dtype(config.data_types.grad_accum_dtype)
    )
    if autocast is torch.float16 or fp16.enabled:
        formats = replace(formats, scale=_scale(config), skip_nonfinite=True)
    if bf16.enabled:
        low = torch.bfloat16 if bf16.bf16_master_weights_and_grads else None
        formats = replace(formats, param=torch.bfloat16, skip_nonfinite=bf16.check_grad_overflow)
    elif fp16.enabled:
        low = torch.float16 if fp16.fp16_master_weights_and_grads else None
        formats = replace(formats, param=torch.float16)
    else:
        return formats
    return formats if low is None else replace(formats, master=low, accumulate=formats.accumulate or low)


def casting_of(config: Config) -> Casting:
    """Return the dtypes of the forward: of inputs, buffers and autocast."""
    autocast = config.torch_autocast
    fallback = torch.get_autocast_dtype("cpu") if autocast.dtype is None else None
    keep, low = config.data_types.keep_in_fp32_modules, config.fp16.enabled or config.bf16.enabled
    lists = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if config.fp16.enabled else ()))
    return Casting(
        inputs=torch.float16 if config.fp16.enabled and config.fp16.auto_cast else None,
        buffers=_dtype(config.data_types.buffer_dtype),
        autocast=(_dtype(autocast.dtype) or fallback) if autocast.enabled else None,
        fp32_names=keep if low and keep != "auto" else (),
        fp32_lists=lists if low and keep == "auto" else (),
    )


def low_precision_rules(
    config: Config, modules: Sequence[ModuleInfo], params: Sequence[ParamInfo]
) -> tuple[PrecisionRule, ...]:
    """Return the rule for gradients that `torch_autocast.lower_precision_safe_modules` lets travel in autocast's format.

    Raises:
        UnsupportedError: of the model only names are known ("plan-model").
        ConfigError: a class cannot be imported ("precision-modules").
    """
    classes, low = config.torch_autocast.lower_precision_safe_modules, casting_of(config).autocast
    if not classes or low is None:
        return ()
    if params and not any(module.kind for module in modules):
        raise UnsupportedError(
            "torch_autocast.lower_precision_safe_modules names classes; the names in weight files do not say what modules they are",
            code="plan-model",
            fix="Name the model by its config.json or by a function that makes it.",
        )
    kinds = {_imported_name(name) for name in classes}
    owners = {module.name for module in modules if module.kind in kinds}
    names = frozenset(param.name for param in params if param.name.rpartition(".")[0] in owners)
    return (PrecisionRule(names, reduce=low),)


def _imported_name(name: str) -> str:
    """Return where the class lies that `name` imports: `torch.nn.modules.linear.Linear` of `torch.nn.Linear`."""
    place, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(place), attribute)
        return f"{found.__module__}.{found.__qualname__}"
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules: {name!r} cannot be imported: {error}",
            code="precision-modules",
            fix='Give the module and the name of a class, as "torch.nn.Linear".',
        ) from error


def precision_text(precision: Precision, casting: Casting) -> str:
    """Describe precision and casting in one line for the plan."""
    travel = precision.reduce or precision.param
    gradients = f"as parameters, add up in {_name(precision.accumulate, 'float32')}"
    if travel is not None:
        gradients = f"in {gradient_text(travel, precision.accumulate or torch.promote_types(travel, torch.float32))}"
    text = f"parameters {_name(precision.param, 'as the model')}, gradients travel {gradients}"
    for rule in precision.rules:
        formats = [] if rule.param is None and rule.reduce is not None else [_name(rule.param, "as the others")]
        formats += [] if rule.reduce is None else [f"gradients travel in {_name(rule.reduce, '')}"]
        text += f", {rule.subject} {', '.join(formats)}"
    if precision.master is not None:
        text += f", masters {_name(precision.master, '')}"
    if precision.scale is not None:
        static = precision.scale.static
        text += f", loss scale {static:g}" if static else f", loss scale from {precision.scale.initial:g}"
    if travel is not None and travel.itemsize < 4 and casting.buffers is None:
        text += ", buffers as the model (data_types.buffer_dtype)"
    if casting.fp32_names:
        text += f", fp32 buffers {' '.join(casting.fp32_names)}"
    named = {"autocast": casting.autocast, "inputs": casting.inputs, "buffers": casting.buffers}
    return text + "".join(f", {what} {_name(dtype, '')}" for what, dtype in named.items() if dtype is not None)


def buffer_note(model: nn.Module, precision: Precision, error: RuntimeError) -> str | None:
    """Explain an error of torch about formats where buffers are wider than the parameters beside them; None for other errors."""
    param, text = precision.param, str(error)
    if param is None or param.itemsize >= 4 or not ("dtype" in text or "scalar type" in text):
        return None
    wide = [n for n, b in model.named_buffers() if b.is_floating_point() and b.dtype.itemsize > param.itemsize]
    if not wide:
        return None
    shown, name = ", ".join(wide[:3]) + (", ..." if len(wide) > 3 else ""), _name(param, "")
    return (
        f"Parameters are {name} and {len(wide)} floating-point buffers are wider ({shown}): buffers keep the format the model has them in. "
        f'data_types.buffer_dtype = "{"bf16" if param is torch.bfloat16 else "fp16"}" casts them, or cast what is made of them in forward.'
    )


def _scale(config: Config) -> LossScale:
    fp16 = config.fp16
    return LossScale(
        static=fp16.loss_scale or None,
        initial=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        minimum=fp16.min_loss_scale,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]


def _name(dtype: torch.dtype | None, default: str) -> str:
    return default if dtype is None else str(dtype).removeprefix("torch.")
