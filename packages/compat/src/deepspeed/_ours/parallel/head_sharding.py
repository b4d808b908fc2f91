"""Shares of a transformer layer's weights for tensor-parallel ranks, where shares need not be even. Pure arithmetic and slices.

Rank r of n has the query heads and the key-value heads that `heads_of` says; what follows of weights follows from that.
Weights are [out, in], biases [out]; queries, keys and values of a fused projection stand one after the other.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ds_config.errors import PlanError
from ds_parallel.heads import HeadCounts, Stretch, spread

DEFAULT_SHARD_GRANULARITY = 32


class ShardingType(Enum):
    """The dim of a weight that is cut: what comes out, or what goes in."""

    OUTER_DIMENSION = 0
    INNER_DIMENSION = 1


class ShardingError(PlanError, ValueError):
    """Heads, features and ranks do not fit."""


def _refuse(message: str) -> ShardingError:
    return ShardingError(
        message, code="compat-shards", fix="Give the model's own numbers of heads, and ranks that they allow."
    )


def get_shard_endpoints(
    dim_size: int, shard_rank: int, num_shards: int, granularity: int = DEFAULT_SHARD_GRANULARITY
) -> Stretch:
    """Return a rank's shard of a dim: whole multiples of `granularity`, one more on the first ranks if uneven."""
    if dim_size % granularity:
        raise _refuse(f"a dim of {dim_size} in pieces of {granularity}")
    start, stop = spread(dim_size // granularity, num_shards)[shard_rank]
    return start * granularity, stop * granularity


def heads_of(
    shard_rank: int, num_shards: int, n_heads_q: int, n_heads_kv: int | None = None
) -> tuple[Stretch, Stretch]:
    """Query heads and key-value heads of a rank; where there are fewer of the latter than ranks, several ranks have the same one.

    Raises:
        PlanError: heads do not fit together, or to the ranks ("compat-shards"); a ValueError, too.
    """
    kv = n_heads_q if n_heads_kv is None else n_heads_kv
    uneven = kv != n_heads_q and max(kv, num_shards) % min(kv, num_shards)
    if n_heads_q < num_shards or n_heads_q % kv or uneven:
        raise _refuse(f"{n_heads_q} query heads and {kv} key-value heads on {num_shards} ranks")
    return HeadCounts(n_heads_q, kv).stretches(num_shards)[shard_rank]


def get_local_heads(shard_rank: int, num_shards: int, n_heads_q: int, n_heads_kv: int | None = None) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads of a rank. Raises as `heads_of`."""
    q, kv = heads_of(shard_rank, num_shards, n_heads_q, n_heads_kv)
    return _length(q), _length(kv)


def shard_param(
    param: Tensor | None, shard_mode: ShardingType, shard_rank: int, num_shards: int, num_concatenated_matrices: int = 1,
    granularity: int = DEFAULT_SHARD_GRANULARITY, bias_dims: int = 1,
) -> Tensor | None:  # fmt: skip
    """Return a rank's shard of each of several concatenated matrices; a tensor of `bias_dims` dims is a bias."""
    if param is None or num_shards == 1:
        return param
    dim = -1 if shard_mode is ShardingType.INNER_DIMENSION or param.ndim == bias_dims else -2
    stretch = get_shard_endpoints(param.shape[dim] // num_concatenated_matrices, shard_rank, num_shards, granularity)
    return torch.cat(
        [matrix.narrow(dim, stretch[0], _length(stretch)) for matrix in param.chunk(num_concatenated_matrices, dim)],
        dim,
    )


def shard_qkv_param(
    param: Tensor, shard_rank: int, num_shards: int, head_size: int, n_heads_q: int | None = None, n_heads_kv: int | None = None
) -> Tensor:  # fmt: skip
    """Return a rank's queries, keys and values of a fused projection.

    Raises as `heads_of`, and for a shape that is not of these heads.
    """
    q, kv = _counts(len(param) // (3 * head_size), n_heads_q, n_heads_kv)
    if len(param) != head_size * (q + 2 * kv):
        raise _refuse(f"{len(param)} rows for {q} query and {kv} key-value heads of {head_size}")
    heads = heads_of(shard_rank, num_shards, q, kv)
    starts = (0, q, q + kv)
    parts = [
        (at + stretch[0], _length(stretch)) for at, stretch in zip(starts, (heads[0], heads[1], heads[1]), strict=True)
    ]
    return torch.cat([param.narrow(0, start * head_size, length * head_size) for start, length in parts])


def qkv_out_features(
    in_features: int, shard_rank: int, num_shards: int, head_size: int, n_heads_q: int | None = None, n_heads_kv: int | None = None
) -> int:  # fmt: skip
    """Return the number of rows of `shard_qkv_param`'s result for a model of this width."""
    q, kv = _counts(in_features // head_size, n_heads_q, n_heads_kv)
    if in_features != q * head_size:
        raise _refuse(f"a width of {in_features} for {q} query heads of {head_size}")
    queries, shared = get_local_heads(shard_rank, num_shards, q, kv)
    return (queries + 2 * shared) * head_size


def shard_attn_out_param(
    param: Tensor, shard_rank: int, num_shards: int, head_size: int, n_heads_q: int | None = None, n_heads_kv: int | None = None
) -> Tensor | None:  # fmt: skip
    """Return a rank's columns of the attention output projection; the bias stays with the first rank."""
    if param.ndim == 1:
        return param if shard_rank == 0 else None
    q, kv = _counts(param.shape[-1] // head_size, n_heads_q, n_heads_kv)
    start, stop = heads_of(shard_rank, num_shards, q, kv)[0]
    return param[..., start * head_size : stop * head_size]


def attn_out_in_features(
    out_features: int, shard_rank: int, num_shards: int, head_size: int, n_heads_q: int | None = None, n_heads_kv: int | None = None
) -> int:  # fmt: skip
    """Return the number of columns of `shard_attn_out_param`'s result."""
    q, kv = _counts(out_features // head_size, n_heads_q, n_heads_kv)
    return get_local_heads(shard_rank, num_shards, q, kv)[0] * head_size


def shard_mlp_1_param(
    param: Tensor, shard_rank: int, num_shards: int, gated: bool = False, is_moe: bool = False
) -> Tensor | None:
    """Return a rank's rows of the first projection; of a gated projection, gates and values alternate.

    Weights of experts have one dim more.
    """
    unit = DEFAULT_SHARD_GRANULARITY * (2 if gated else 1)
    return shard_param(param, ShardingType.OUTER_DIMENSION, shard_rank, num_shards, 1, unit, 2 if is_moe else 1)


def shard_mlp_2_param(param: Tensor, shard_rank: int, num_shards: int, is_moe: bool = False) -> Tensor | None:
    """Return a rank's columns of the second projection; only the first rank has its bias."""
    if param.ndim == (2 if is_moe else 1):
        return param if shard_rank == 0 else None
    return shard_param(param, ShardingType.INNER_DIMENSION, shard_rank, num_shards)


def sharded_intermediate_dim(intermediate_size: int, num_shards: int, shard_rank: int) -> int:
    """Return the width between the two projections on a rank."""
    return _length(get_shard_endpoints(intermediate_size, shard_rank, num_shards))


def shard_embedding_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor | None:
    """Return a rank's features of every embedding vector."""
    return shard_param(param, ShardingType.INNER_DIMENSION, shard_rank, num_shards)


def sharded_embedding_dim(embedding_size: int, shard_rank: int, num_shards: int) -> int:
    """Return the number of embedding features on a rank."""
    return _length(get_shard_endpoints(embedding_size, shard_rank, num_shards))


def shard_unembed_param(param: Tensor, shard_rank: int, num_shards: int) -> Tensor | None:
    """Return a rank's vocabulary range of the last projection."""
    return shard_param(param, ShardingType.OUTER_DIMENSION, shard_rank, num_shards, granularity=1)


def sharded_unembed_dim(vocab_size: int, shard_rank: int, num_shards: int) -> int:
    """Return the size of a rank's vocabulary range."""
    return _length(get_shard_endpoints(vocab_size, shard_rank, num_shards, 1))


def _counts(heads: int, n_heads_q: int | None, n_heads_kv: int | None) -> tuple[int, int]:
    if n_heads_kv is not None and n_heads_q is None:
        raise _refuse("n_heads_kv without n_heads_q")
    q = heads if n_heads_q is None else n_heads_q
    return q, q if n_heads_kv is None else n_heads_kv


def _length(stretch: Stretch) -> int:
    return stretch[1] - stretch[0]
