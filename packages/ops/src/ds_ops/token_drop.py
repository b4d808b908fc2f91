"""Random layer-token dropping (random-LTD, Yao et al. 2022): a layer sees some tokens only, the others pass it by."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_config.errors import KernelError
from ds_ops import _call

__all__ = ["gather_tokens", "sample_tokens", "scatter_tokens"]


def sample_tokens(
    layers: int, batch: int, length: int, keep: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Which tokens each layer keeps: int64 [layers, batch, keep], ascending, drawn without replacement.

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
    """[batch, keep, n]: the tokens index [batch, keep] of x [batch, length, n]. One read and write of what is kept."""
    _require(x, index)
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[2]))


def scatter_tokens(x: Tensor, part: Tensor, index: Tensor) -> Tensor:
    """x with the tokens index [batch, keep] replaced by part [batch, keep, n]; gradients reach both. Copies x once."""
    _require(x, index)
    if part.shape != (*index.shape, x.shape[2]) or part.dtype != x.dtype:
        raise _bad(f"part: expected {x.dtype} {[*index.shape, x.shape[2]]}; found {_call.describe(part)}.")
    return x.scatter(1, index[..., None].expand_as(part), part)


def _bad(message: str) -> KernelError:
    return KernelError(message, code="kernel-argument", fix="Give tensors the shapes of the docstring.")


def _require(x: Tensor, index: Tensor) -> None:
    if x.dim() != 3 or index.dim() != 2 or index.shape[0] != x.shape[0] or index.dtype is not torch.int64:
        raise _bad(f"x [batch, length, n] {_call.describe(x)} and index int64 [batch, keep] {_call.describe(index)}.")
