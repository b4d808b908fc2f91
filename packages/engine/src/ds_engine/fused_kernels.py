"""The functions that take the place of a transformers model's norms, rotary embedding, gated MLPs and head: Liger's or ours.

Liger's Triton kernels are taken on CUDA where `liger-kernel` is installed (the extra `ds-engine[liger]`), ds-ops' elsewhere. Both
round once where the model's own code rounds after each operation, and keep inputs for backward in place of every intermediate result.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ops.activation_functions import geglu, swiglu
from ds_ops.norms import rms_norm
from ds_ops.rotary import rotate
from ds_parallel.tiling import tiled_cross_entropy

__all__ = ["FusedKernels", "select_kernels"]

_LIGER = "liger_kernel.transformers.functional"


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """One implementation of each function.

    Attributes:
        name: Whose they are, for the log.
        norm: (x [..., n], weight [n], eps, offset) to x / rms(x) * (offset + weight), in the format of x. The offset is 0 or 1.
        rotary: (q, k [batch, heads, tokens, width], cos, sin [batch, tokens, width]) to both, rotated.
        gated: (gate, up, activation) to activation(gate) * up. The activation is "silu", "gelu" or "gelu-tanh".
        head: (hidden [tokens, width], weight [vocabulary, width], bias, labels [tokens], ignore_index) to the sum of the losses.
    """

    name: str
    norm: Callable[[Tensor, Tensor, float, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, Tensor, str], Tensor]
    head: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], Tensor]


def select_kernels(device: torch.device) -> FusedKernels:
    """Return Liger's kernels on a CUDA device where they are installed, else ours."""
    if device.type != "cuda":
        return OWN_KERNELS
    try:
        functions = importlib.import_module(_LIGER)
    except ImportError:
        return OWN_KERNELS
    return liger_kernels(functions)


def liger_kernels(functions: Any) -> FusedKernels:
    """Build the record of Liger's functions.

    Its head is taken if it can add the weight's gradient up in fp32 (`accum_dtype`), else ours is: in bf16 the error grows with the tiles.

    Args:
        functions: The module `liger_kernel.transformers.functional`.
    """

    def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        mode = "gemma" if offset else "llama"
        # Not in place: the gradient that it would overwrite is also that of the residual sum.
        return functions.liger_rms_norm(x, weight, eps, offset, mode, False)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return functions.liger_rope(q, k, cos, sin)

    def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "silu":
            return functions.liger_swiglu(gate, up)
        # Liger has the approximation by tanh only.
        return functions.liger_geglu(gate, up) if activation == "gelu-tanh" else _gated(gate, up, activation)

    def head(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor:
        options = {"bias": bias, "ignore_index": ignore_index, "reduction": "sum", "accum_dtype": torch.float32}
        return functions.liger_fused_linear_cross_entropy(hidden, weight, labels, **options)

    wide = "accum_dtype" in inspect.signature(functions.liger_fused_linear_cross_entropy).parameters
    return FusedKernels("Liger", norm, rotary, gated, head if wide else _head)


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return rms_norm(x, weight.float() + offset if offset else weight, eps=eps)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    pairs = cos.shape[-1] // 2  # transformers' tables say each angle twice
    tables = cos[..., :pairs], sin[..., :pairs]
    rotated = [rotate(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k)]
    return rotated[0], rotated[1]


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu-tanh" else "none")


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor:
    # A tile's logits take about the memory of the hidden states.
    tiles = -(-weight.shape[0] // weight.shape[1])
    return tiled_cross_entropy(
        hidden, weight, labels, bias=bias, tiles=tiles, ignore_index=ignore_index, reduction="sum"
    )


OWN_KERNELS = FusedKernels("ds-ops", _norm, _rotary, _gated, _head)
