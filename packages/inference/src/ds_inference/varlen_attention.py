"""torch's own attention over a block table, `varlen_attn`, for devices where Triton does not run. It needs no compiler.

It has no softcap, ALiBi, sinks, or codes of 8 bits, and reads blocks of multiples of 256 tokens: calls with other ones gather.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ds_inference.spec import AttentionSpec
from ds_ops.registry import Unavailable

__all__ = ["varlen_attend", "varlen_obstacle", "varlen_reads"]

_PAGE = 256
_WIDEST = 256


def varlen_obstacle(device_type: str, dtype: torch.dtype) -> str:
    """Return why `varlen_attn` cannot read a block table for tensors of this kind, an `Unavailable`; an empty string if it can."""
    if device_type != "cuda":
        return Unavailable("runs on cuda tensors only", elsewhere=True)
    if dtype not in (torch.bfloat16, torch.float16):
        return Unavailable(f"does not take {dtype}", fix="convert to torch.bfloat16")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return Unavailable("torch's flash attention wants compute capability 8.0")
    return _no_block_table()


@functools.cache
def _no_block_table() -> str:
    try:
        known = set(inspect.signature(_function()).parameters)
    except ImportError:
        known = set()
    if not {"block_table", "seqused_k", "num_splits"} <= known:
        return Unavailable(
            f"torch {torch.__version__} has no varlen_attn with a block table", fix="install torch 2.12 or newer"
        )
    return ""


def _function() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def varlen_reads(spec: AttentionSpec, cache: tuple[Tensor, ...], extra: tuple[Tensor | None, Tensor | None]) -> bool:
    """Whether `varlen_attend` computes this attention over such a cache."""
    plain = spec.softcap is None and all(t is None for t in extra) and len(cache) == 2
    return plain and spec.width == spec.value_width <= _WIDEST and cache[0].shape[1] % _PAGE == 0


def varlen_attend(
    q: Tensor, cache: tuple[Tensor, ...], metadata: tuple[Tensor, Tensor, Tensor, int], spec: AttentionSpec
) -> Tensor:
    """Compute the attention of each token over its sequence in the cache; valid on the current stream.

    Args:
        q: [T, heads, width].
        cache: Keys and values [blocks, size, kv heads, width].
        metadata: `cu_seqlens_q`, `seqlens_k`, `block_table` and `max_seqlen_q` of a batch.
    Returns: [T, heads, width].
    """
    (keys, values), (starts, lengths, table, longest) = cache, metadata
    left = -1 if spec.window is None else spec.window - 1
    out: Tensor = _function()(
        q, keys, values, starts, None, longest, table.shape[1] * keys.shape[1],
        scale=spec.scale, window_size=(left, 0), enable_gqa=spec.heads != spec.kv_heads,
        seqused_k=lengths, block_table=table.contiguous(), num_splits=1,  # by itself it has split paged caches wrongly
    )  # fmt: skip
    return out
