"""`deepspeed.ops.op_builder`: the classes that programs ask whether an operation can be used, and for its functions.

Upstream's builders compile when they are first asked. Here operations are compiled with ds-ops, or run as its plain definition:
a builder only hands out functions under upstream's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed._ours.base._torch import flatten, unflatten
from deepspeed._ours.base.raising import refused
from deepspeed._ours.native_ops.aio_handles import functions as file_functions
from ds_ops.apply_update import update
from ds_ops.update_rules import (
    AdamHyper,
    UpdateRule,
    UpdateSpec,
    UpdateTensors,
    adagrad_coefficients,
    adam_coefficients,
    dither_of,
    lion_coefficients,
)


class OpBuilder:
    """One operation: its name, whether it can be used here, and its functions.

    Attributes:
        NAME: Upstream's name of the operation.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""
    functions: ClassVar[Callable[[], Mapping[str, Any]] | None] = None

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch is built for AMD's devices."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` gives something."""
        del verbose
        return type(self).functions is not None

    def absolute_name(self) -> str:
        """Return the name of the module that upstream would have compiled."""
        return f"deepspeed.ops.{self.name}_op"

    def sources(self) -> list[str]:
        """Return an empty list: nothing is compiled here."""
        return []

    def load(self, verbose: bool = False) -> Any:
        """Return an object with the operation's functions.

        Raises:
            UnsupportedError: the functions of this operation are not here ("compat-missing").
        """
        del verbose
        functions = type(self).functions
        if functions is None:
            raise refused("builder-functions", type(self).__name__, self.name)
        return SimpleNamespace(**functions())

    jit_load = load


class CUDAOpBuilder(OpBuilder):
    """As `OpBuilder`; upstream's base of what nvcc compiles."""


# ---- optimizers, by their numbers

_hypers: dict[tuple[str, int], dict[str, Any]] = {}


def _made(kind: str, *names: str) -> Callable[..., int]:
    def create(optimizer_id: int, *values: Any, **named: Any) -> int:
        _hypers[kind, optimizer_id] = dict(zip(names, values, strict=False)) | named
        return 0

    return create


def _ended(kind: str) -> Callable[[int], int]:
    def destroy(optimizer_id: int) -> int:
        _hypers.pop((kind, optimizer_id), None)
        return 0

    return destroy


def _run(spec: UpdateSpec, param: Tensor, grad: Tensor, *states: Tensor) -> int:
    update(spec, UpdateTensors([param.data], [grad], tuple([state] for state in states)))
    return 0


def _cpu_adam() -> Mapping[str, Any]:
    def adam_update(
        optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float,
        corrects: bool, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    ) -> int:  # fmt: skip
        decoupled = bool(_hypers.get(("adam", optimizer_id), {}).get("adamw_mode", True))
        hyper = AdamHyper(lr, (beta1, beta2), eps, decay, decoupled, bool(corrects))
        spec = UpdateSpec(UpdateRule.ADAM, adam_coefficients(hyper, step), dither=dither_of(step))
        return _run(spec, param, grad, exp_avg, exp_avg_sq)

    names = ("alpha", "betta1", "betta2", "eps", "weight_decay", "adamw_mode", "should_log")
    return {"create_adam": _made("adam", *names), "adam_update": adam_update, "destroy_adam": _ended("adam")}


def _cpu_adagrad() -> Mapping[str, Any]:
    def adagrad_update(
        optimizer_id: int, step: int, lr: float, eps: float, decay: float, param: Tensor, grad: Tensor, exp_avg_sq:
        Tensor,
    ) -> int:  # fmt: skip
        del optimizer_id
        spec = UpdateSpec(UpdateRule.ADAGRAD, adagrad_coefficients(lr, eps, decay), dither=dither_of(step))
        return _run(spec, param, grad, exp_avg_sq)

    return {
        "create_adagrad": _made("adagrad", "alpha", "eps", "weight_decay", "should_log"),
        "adagrad_update": adagrad_update,
        "destroy_adagrad": _ended("adagrad"),
    }


def _cpu_lion() -> Mapping[str, Any]:
    def lion_update(
        optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, decay: float, param: Tensor, grad: Tensor,
        exp_avg: Tensor,
    ) -> int:  # fmt: skip
        del optimizer_id, step
        return _run(UpdateSpec(UpdateRule.LION, lion_coefficients(lr, (beta1, beta2), decay)), param, grad, exp_avg)

    return {
        "create_lion": _made("lion", "alpha", "betta1", "betta2", "weight_decay", "should_log"),
        "lion_update": lion_update,
        "destroy_lion": _ended("lion"),
    }


def _fused_adam() -> Mapping[str, Any]:
    def multi_tensor_adam(
        chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float,
        eps: float, step: int, adam_w_mode: int, bias_correction: int, weight_decay: float,
    ) -> None:  # fmt: skip
        del chunk_size, overflow
        grads, params, *moments = lists
        hyper = AdamHyper(lr, (beta1, beta2), eps, weight_decay, bool(adam_w_mode), bool(bias_correction))
        tensors = UpdateTensors(list(params), list(grads), tuple(list(part) for part in moments))
        update(UpdateSpec(UpdateRule.ADAM, adam_coefficients(hyper, step), dither=dither_of(step)), tensors)

    return {"multi_tensor_adam": multi_tensor_adam}


def _files() -> Mapping[str, Any]:
    return file_functions()


# ---- flat buffers


def _bytes(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    if isinstance(tensors, Tensor):
        return tensors.detach().reshape(-1).view(torch.uint8)
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


def _utils() -> Mapping[str, Any]:
    return {"flatten": flatten, "unflatten": unflatten, "cast_to_byte_tensor": _bytes}


# ---- the classes

_NAMES: Mapping[str, tuple[str, Callable[[], Mapping[str, Any]] | None]] = {
    "AsyncIOBuilder": ("async_io", _files),
    "CCLCommBuilder": ("deepspeed_ccl_comm", None),
    "CPUAdagradBuilder": ("cpu_adagrad", _cpu_adagrad),
    "CPUAdamBuilder": ("cpu_adam", _cpu_adam),
    "CPULionBuilder": ("cpu_lion", _cpu_lion),
    "DeepCompileBuilder": ("dc", None),
    "EvoformerAttnBuilder": ("evoformer_attn", None),
    "FPQuantizerBuilder": ("fp_quantizer", None),
    "FusedAdamBuilder": ("fused_adam", _fused_adam),
    "FusedLambBuilder": ("fused_lamb", None),
    "FusedLionBuilder": ("fused_lion", None),
    "GDSBuilder": ("gds", None),
    "InferenceBuilder": ("transformer_inference", None),
    "InferenceCoreBuilder": ("inference_core_ops", None),
    "InferenceCutlassBuilder": ("cutlass_ops", None),
    "NotImplementedBuilder": ("deepspeed_not_implemented", None),
    "PinMemoryBuilder": ("pin_memory", None),
    "QuantizerBuilder": ("quantizer", None),
    "RaggedOpsBuilder": ("ragged_device_ops", None),
    "RaggedUtilsBuilder": ("ragged_ops", None),
    "RandomLTDBuilder": ("random_ltd", None),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", None),
    "SparseAttnBuilder": ("sparse_attn", None),
    "SpatialInferenceBuilder": ("spatial_inference", None),
    "StochasticTransformerBuilder": ("stochastic_transformer", None),
    "TransformerBuilder": ("transformer", None),
    "UtilsBuilder": ("utils", _utils),
}


def _builder(name: str) -> type[OpBuilder]:
    op, functions = _NAMES[name]
    there = {
        "__module__": __name__,
        "__doc__": f"Upstream's operation `{op}`.",
        "NAME": op,
        "BUILD_VAR": f"DS_BUILD_{op.upper()}",
        "functions": None if functions is None else staticmethod(functions),
    }
    return type(name, (CUDAOpBuilder,), there)


BUILDERS: Mapping[str, type[OpBuilder]] = {name: _builder(name) for name in _NAMES}
"""Class by its name."""
globals().update(BUILDERS)
ALL_OPS: Mapping[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}
"""A builder by the name of its operation."""
COMPATIBLE: Mapping[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
"""Which of them can be loaded."""
