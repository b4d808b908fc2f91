"""Microbatches of about as many tokens instead of as many samples, and learning rates that follow. Pure but for `VariableBatchSizeLR`.

Samples are taken in an order, and put into a microbatch until one more would make it longer than `max_tokens` or larger than
`max_batch_size`. Samples longer than `max_tokens` alone are dropped, and counted. A *batch* is the microbatches of one step over all ranks; an
incomplete one at the end is left out.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_config.errors import ConfigError

__all__ = ["BatchPacking", "PickingOrder", "batch_by_seqlens", "pack_by_seqlens", "scale_lr"]

_log = logging.getLogger("ds_data")

PickingOrder = Literal["dataloader", "random", "seqlen"]


@dataclass(frozen=True, slots=True)
class BatchPacking:
    """Microbatches of whole batches.

    Attributes:
        microbatches: Sample ids of each.
        sizes: Samples of each batch, all its microbatches together.
        longest: Longest sample of each batch, in tokens.
        dropped: Samples longer than `max_tokens`.
        left_out: Samples at the end that fill no batch, or microbatches below `min_batch_size`.
    """

    microbatches: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    longest: tuple[int, ...]
    dropped: int
    left_out: int


def pack_by_seqlens(
    seqlens: ArrayLike,
    max_tokens: int,
    *,
    sizes: tuple[int, int | None] = (1, None),
    order: PickingOrder = "dataloader",
    per_batch: int = 1,
    same_size: bool = False,
    seed: int = 1234,
) -> BatchPacking:
    """Put samples together by length.

    Args:
        seqlens: [n], tokens of each sample.
        max_tokens: Most tokens of a microbatch.
        sizes: Fewest and most samples of a microbatch; None is no limit.
        order: In which samples are taken: as they are, shuffled by `seed`, or from short to long.
        per_batch: Microbatches of a batch (ranks x accumulation).
        same_size: Give all microbatches of a batch the same number of samples, as pipelines need: those that come one after
            the other in the order go to different microbatches.
    Raises:
        ConfigError: a limit says nothing, or not one batch is full ("data-max-tokens").
    Cost: linear in the number of samples, but for sorting.
    """
    lengths, (fewest, most) = np.asarray(seqlens, np.int64), sizes
    if max_tokens < 1 or fewest < 1 or per_batch < 1 or (most is not None and most < fewest) or (lengths < 0).any():
        raise ConfigError(
            f"max_tokens {max_tokens}, batch sizes {fewest} to {most}, {per_batch} microbatches a batch, samples of {lengths.min(initial=0)} tokens say nothing",
            code="data-max-tokens",
            fix="Give positive numbers, and min_batch_size <= max_batch_size.",
        )
    ids = _ordered(lengths, order, seed)
    usable = ids[lengths[ids] <= max_tokens]
    dropped = len(ids) - len(usable)
    group = _alike if same_size else _greedy
    packed = group(usable.tolist(), lengths[usable].tolist(), max_tokens, math.inf if most is None else most, per_batch)
    full = [micro for micro in packed if len(micro) >= fewest]
    full = full[: len(full) // per_batch * per_batch]
    if not full:
        raise ConfigError(
            f"{len(lengths)} samples ({dropped} longer than {max_tokens} tokens) fill not one batch of {per_batch} microbatches",
            code="data-max-tokens",
            fix="Give a larger max_tokens, a smaller min_batch_size, or more data.",
        )
    batches = [full[at : at + per_batch] for at in range(0, len(full), per_batch)]
    return BatchPacking(
        tuple(map(tuple, full)),
        tuple(sum(map(len, batch)) for batch in batches),
        tuple(max(int(lengths[i]) for micro in batch for i in micro) for batch in batches),
        dropped,
        len(usable) - sum(map(len, full)),
    )


def batch_by_seqlens(
    seqlens: ArrayLike,
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | Sequence[Sequence[int]] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: PickingOrder = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """`pack_by_seqlens` with DeepSpeed's names.

    Args:
        sequence_ids_per_mb: The samples to take; None takes all. A group in place of a sample stays together, and counts as one sample that is as
            long as all its members.
        verbose: Log what was dropped.
    Returns:
        (batch, sample ids) of every microbatch; samples of each batch; longest sample of each batch.
    """
    lengths = np.asarray(seqlens, np.int64)
    taken = range(len(lengths)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    groups = [[int(i) for i in np.atleast_1d(np.asarray(entry))] for entry in taken]
    packed = pack_by_seqlens(
        [int(lengths[group].sum()) for group in groups],
        max_tokens,
        sizes=(min_batch_size, max_batch_size),
        order=sequence_picking_order,
        per_batch=effective_batch_size,
        same_size=required_microbatches_of_same_size,
        seed=0 if seed is None else seed,
    )
    if verbose or packed.dropped:
        _log.warning(
            "%d samples longer than %d tokens are dropped; %d fill no batch",
            packed.dropped,
            max_tokens,
            packed.left_out,
        )
    members = [[i for group in micro for i in groups[group]] for micro in packed.microbatches]
    batches = [members[at : at + effective_batch_size] for at in range(0, len(members), effective_batch_size)]
    return (
        [(at // effective_batch_size, micro) for at, micro in enumerate(members)],
        [sum(map(len, batch)) for batch in batches],
        [max(int(lengths[i]) for micro in batch for i in micro) for batch in batches],
    )


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1.0, method: str | None = "linear") -> float:
    """Scale `base_lr` from `base_batch_size` to `batch_size`: times k, times sqrt(k), or unchanged ("none", or None).

    Raises:
        ConfigError: there is no such method ("data-max-tokens").
    """
    k = batch_size / base_batch_size
    factors = {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}
    method = "none" if method is None else method.lower()
    if method not in factors:
        raise ConfigError(
            f"there is no way {method!r} to scale", code="data-max-tokens", fix=f"Use {', '.join(factors)}."
        )
    return base_lr * factors[method]


def _ordered(lengths: NDArray[np.int64], order: str, seed: int) -> NDArray[Any]:
    if order == "seqlen":
        return np.argsort(lengths, kind="stable")
    ids = np.arange(len(lengths))
    if order == "dataloader" or not len(lengths):
        return ids
    if order == "random":
        shuffled = ids.tolist()
        random.Random(seed).shuffle(shuffled)
        return np.array(shuffled)
    raise ConfigError(
        f"there is no picking order {order!r}", code="data-max-tokens", fix="Use dataloader, random or seqlen."
    )


def _greedy(ids: list[int], lengths: list[int], room: int, most: float, per_batch: int) -> list[list[int]]:
    del per_batch
    out: list[list[int]] = []
    left = -1
    for sample, length in zip(ids, lengths, strict=True):
        if not out or length > left or len(out[-1]) >= most:
            out.append([])
            left = room
        out[-1].append(sample)
        left -= length
    return out


def _alike(ids: list[int], lengths: list[int], room: int, most: float, per_batch: int) -> list[list[int]]:
    """Build batches of `per_batch` microbatches that grow in step, a sample each, until a microbatch is full."""
    out: list[list[int]] = []
    left: list[int] = []
    for at in range(0, len(ids) - per_batch + 1, per_batch):
        row, sizes = ids[at : at + per_batch], lengths[at : at + per_batch]
        if not left or len(out[-1]) >= most or any(size > space for size, space in zip(sizes, left, strict=True)):
            out += [[] for _ in row]
            left = [room] * per_batch
        for micro, sample in zip(out[-per_batch:], row, strict=True):
            micro.append(sample)
        left = [space - size for space, size in zip(left, sizes, strict=True)]
    return out
