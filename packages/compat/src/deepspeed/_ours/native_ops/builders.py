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
from deepspeed._ours.base.forwarding import method
from deepspeed._ours.base.raising import refused
from deepspeed._ours.native_ops.aio_handles import functions as file_functions
from deepspeed._ours.native_ops.pinned_memory import pin_functions
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

    is_compatible = method(
        lambda self, verbose=False: type(self).functions is not None, "Whether `load` gives something."
    )

    absolute_name = method(
        lambda self: f"deepspeed.ops.{self.name}_op", "Return the name of the module that upstream would have compiled."
    )

    sources = method(lambda self: [], "Return an empty list: nothing is compiled here.")

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


def _numbered(kind: str, update: Callable[..., int], *names: str) -> Mapping[str, Any]:
    """Return the functions of an optimizer: what makes one of a number, with the values of these names, updates, and ends it."""

    def create(optimizer_id: int, *values: Any, **named: Any) -> int:
        _hypers[kind, optimizer_id] = dict(zip(names, values, strict=False)) | named
        return 0

    def destroy(optimizer_id: int) -> int:
        _hypers.pop((kind, optimizer_id), None)
        return 0

    return {f"create_{kind}": create, f"{kind}_update": update, f"destroy_{kind}": destroy}


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

    return _numbered(
        "adam", adam_update, "alpha", "betta1", "betta2", "eps", "weight_decay", "adamw_mode", "should_log"
    )


def _cpu_adagrad() -> Mapping[str, Any]:
    def adagrad_update(
        optimizer_id: int, step: int, lr: float, eps: float, decay: float, param: Tensor, grad: Tensor, exp_avg_sq:
        Tensor,
    ) -> int:  # fmt: skip
        del optimizer_id
        spec = UpdateSpec(UpdateRule.ADAGRAD, adagrad_coefficients(lr, eps, decay), dither=dither_of(step))
        return _run(spec, param, grad, exp_avg_sq)

    return _numbered("adagrad", adagrad_update, "alpha", "eps", "weight_decay", "should_log")


def _cpu_lion() -> Mapping[str, Any]:
    def lion_update(
        optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, decay: float, param: Tensor, grad: Tensor,
        exp_avg: Tensor,
    ) -> int:  # fmt: skip
        del optimizer_id, step
        return _run(UpdateSpec(UpdateRule.LION, lion_coefficients(lr, (beta1, beta2), decay)), param, grad, exp_avg)

    return _numbered("lion", lion_update, "alpha", "betta1", "betta2", "weight_decay", "should_log")


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


# ---- flat buffers


def _bytes(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    if isinstance(tensors, Tensor):
        return tensors.detach().reshape(-1).view(torch.uint8)
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


# ---- the classes

_OPS: Mapping[str, str] = dict(
    pair.split("=")
    for pair in [
        "AsyncIO=async_io",
        "CCLComm=deepspeed_ccl_comm",
        "CPUAdagrad=cpu_adagrad",
        "CPUAdam=cpu_adam",
        "CPULion=cpu_lion",
        "DeepCompile=dc",
        "EvoformerAttn=evoformer_attn",
        "FPQuantizer=fp_quantizer",
        "FusedAdam=fused_adam",
        "FusedLamb=fused_lamb",
        "FusedLion=fused_lion",
        "GDS=gds",
        "Inference=transformer_inference",
        "InferenceCore=inference_core_ops",
        "InferenceCutlass=cutlass_ops",
        "NotImplemented=deepspeed_not_implemented",
        "PinMemory=pin_memory",
        "Quantizer=quantizer",
        "RaggedOps=ragged_device_ops",
        "RaggedUtils=ragged_ops",
        "RandomLTD=random_ltd",
        "ShareMemComm=deepspeed_shm_comm",
        "SparseAttn=sparse_attn",
        "SpatialInference=spatial_inference",
        "StochasticTransformer=stochastic_transformer",
        "Transformer=transformer",
        "Utils=utils",
    ]
)
"""Upstream's operations by the beginnings of their builders' names."""
_FUNCTIONS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "async_io": file_functions, "cpu_adagrad": _cpu_adagrad, "cpu_adam": _cpu_adam, "cpu_lion": _cpu_lion, "fused_adam": _fused_adam,
    "pin_memory": pin_functions,
    "utils": lambda: {"flatten": flatten, "unflatten": unflatten, "cast_to_byte_tensor": _bytes},
}  # fmt: skip
"""What those that are here load."""


def _builder(name: str, op: str) -> type[OpBuilder]:
    functions = staticmethod(_FUNCTIONS[op]) if op in _FUNCTIONS else None
    there = {"NAME": op, "BUILD_VAR": f"DS_BUILD_{op.upper()}", "functions": functions}
    meaning = {"__module__": __name__, "__doc__": f"Upstream's operation `{op}`."}
    return type(f"{name}Builder", (CUDAOpBuilder,), meaning | there)


BUILDERS: Mapping[str, type[OpBuilder]] = {f"{name}Builder": _builder(name, op) for name, op in _OPS.items()}
"""Class by its name."""
globals().update(BUILDERS)
ALL_OPS: Mapping[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}
"""A builder by the name of its operation."""
COMPATIBLE: Mapping[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
"""Which of them can be loaded."""
