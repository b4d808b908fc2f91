"""Random layer-token dropping (random-LTD, Yao et al. 2022): a layer sees some tokens only, the others pass it by."""

from __future__ import annotations

import torch
from torch import Tensor

import ds_ops._call as _call
from ds_config.errors import KernelError
from ds_ops.registry import Op, absent_backend, choose, reference_backend, register

__all__ = ["gather_tokens", "sample_tokens", "scatter_tokens"]


def sample_tokens(
    layers: int, batch: int, length: int, keep: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the tokens that each layer keeps: int64 [layers, batch, keep], ascending, without replacement.

    Raises:
        KernelError: "kernel-argument" if keep is not in 0..length.
    """
    if not 0 <= keep <= length:
        raise KernelError(
            f"{keep} of {length} tokens cannot be kept.", code="kernel-argument", fix="Keep between 0 and all of them."
        )
    device = generator.device if generator is not None else "cpu"
    ranks = torch.rand(layers, batch, length, generator=generator, device=device).argsort(-1)
    return ranks[..., :keep].sort(-1).values


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens index[b] of each x[b]: out[b, i] = x[b, index[b, i]]. The backward scatters the gradient.

    Args:
        x: [batch, length, n] of any dtype. index: int64 [batch, keep], each in 0..length - 1.

    Raises:
        KernelError: "kernel-argument" if shapes or devices do not fit, or an index is outside of x (on the CPU).
    Cost: one read and write of the selected tokens. Source: Yao et al. 2022.
    """
    _require(x, index)
    out: Tensor = choose(_GATHER, x.device.type, x.dtype).backend.run(x, index)
    return out


def scatter_tokens(x: Tensor, part: Tensor, index: Tensor) -> Tensor:
    """Scatter tokens: return x with out[b, index[b, i]] = part[b, i]; gradients reach both.

    Args:
        x: [batch, length, n] of any dtype. part: [batch, keep, n], same dtype. index: int64 [batch, keep], no two
        equal.

    Raises:
        KernelError: as `gather_tokens`.
    Cost: one read and write of x, and of the selected tokens. Source: Yao et al. 2022.
    """
    _require(x, index)
    if part.shape != (*index.shape, x.shape[2]) or part.dtype != x.dtype or part.device != x.device:
        raise _call.refuse(f"part: expected {x.dtype} {[*index.shape, x.shape[2]]}; found {_call.describe(part)}.")
    out: Tensor = choose(_SCATTER, x.device.type, x.dtype).backend.run(x, part, index)
    return out


def _require(x: Tensor, index: Tensor) -> None:
    fits = x.dim() == 3 and index.dim() == 2 and index.shape[0] == x.shape[0] and index.device == x.device
    if not fits or index.dtype is not torch.int64:
        raise _call.refuse(
            f"x [batch, length, n] {_call.describe(x)} and index int64 [batch, keep] {_call.describe(index)}."
        )
    # On a GPU torch's own kernel traps; asking there would wait for the device, and a compiler has nothing to ask.
    if torch.compiler.is_compiling():
        return
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < x.shape[1]:
        raise _call.refuse(f"index has {int(index.min())}..{int(index.max())}, of {x.shape[1]} tokens.")


def _reference_gather(x: Tensor, index: Tensor) -> Tensor:
    if _is_byte(x):
        return _reference_gather(x.view(torch.uint8), index).view(x.dtype)
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[2]))


def _reference_scatter(x: Tensor, part: Tensor, index: Tensor) -> Tensor:
    if _is_byte(x):
        return _reference_scatter(x.view(torch.uint8), part.view(torch.uint8), index).view(x.dtype)
    return x.scatter(1, index[..., None].expand_as(part), part)


def _is_byte(x: Tensor) -> bool:
    """Return whether x has floats of one byte, which torch moves only as integers.

    Such floats have no gradient.
    """
    return x.dtype.is_floating_point and x.dtype.itemsize == 1


_WHY = "not written: torch's {} reads and writes each token once"
_GATHER = register(
    Op(
        "gather_tokens",
        "the tokens that a layer sees",
        (absent_backend("cpu", _WHY.format("gather")), reference_backend(_reference_gather, moves=True)),
    )
)
_SCATTER = register(
    Op(
        "scatter_tokens",
        "the tokens that a layer saw, put back",
        (absent_backend("cpu", _WHY.format("scatter")), reference_backend(_reference_scatter, moves=True)),
    )
)
