"""Attention over a paged cache: a ragged batch of chunks, each reads the blocks of its own sequence.

The chunks that bring one token are computed together, over a table of blocks padded to the longest of them; the others one by
one. Reference for the tests and for devices: plain torch. Scores are softmaxed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_inference.scheduler import ScheduledChunk
from ds_inference.spec import AttentionSpec

__all__ = ["BatchIndices", "alibi_slopes", "attend", "keep", "make_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchIndices:
    """A step's chunks as indices. T tokens in all, of which the first D are one-token chunks, in that order.

    Attributes:
        tokens, positions: int64 [T].
        slots: int64 [T]: where each token's keys and values go, block * size + offset.
        outputs: int64 [R]: tokens whose distribution is wanted, in order of the chunks.
        single: How many one-token chunks there are (D).
        tables: int64 [D, M]: their blocks, padded with block 0.
        lengths: int64 [D]: tokens of their sequences, the new one included.
        spans: Of the other chunks: (first token, tokens, position of the first, blocks int64 [.]).
        chunks: All of them as numbers: (first token, tokens, position of the first, blocks).
        worn: Adapters, and int64 [.] which tokens wear each.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    single: int
    tables: Tensor
    lengths: Tensor
    spans: tuple[tuple[int, int, int, Tensor], ...]
    chunks: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    worn: tuple[tuple[str, Tensor], ...] = ()


def make_batch(
    chunks: Sequence[ScheduledChunk], size: int, device: torch.device
) -> tuple[BatchIndices, list[ScheduledChunk]]:
    """Build the batch, and return its chunks in the order to which `outputs` belong.

    size: tokens of a block. All index tensors are built on the host and copied to the device at once.
    """
    order = [c for c in chunks if len(c.tokens) == 1] + [c for c in chunks if len(c.tokens) != 1]
    single = sum(len(c.tokens) == 1 for c in chunks)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    spans, numbers = [], []
    for chunk in order:
        first, count = len(tokens), len(chunk.tokens)
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.start + count)
        slots += [chunk.blocks[at // size] * size + at % size for at in range(chunk.start, chunk.start + count)]
        outputs += range(first + count - chunk.outputs, first + count)
        numbers.append((first, count, chunk.start, tuple(chunk.blocks)))
        if count > 1:
            spans.append((first, count, chunk.start, torch.tensor(chunk.blocks, device=device)))
    longest = max((len(c.blocks) for c in order[:single]), default=0)
    tables = [[*c.blocks, *([0] * (longest - len(c.blocks)))] for c in order[:single]]
    batch = BatchIndices(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(outputs, dtype=torch.int64, device=device),
        single,
        torch.tensor(tables, dtype=torch.int64, device=device).view(single, longest),
        torch.tensor([c.start + 1 for c in order[:single]], dtype=torch.int64, device=device),
        tuple(spans),
        tuple(numbers),
    )
    return batch, order


def keep(new: Tensor, slots: Tensor, blocks: Tensor, scales: Tensor | None) -> None:
    """Write keys or values [T, heads, width] into the KV cache's blocks [blocks, size, heads, width].

    Blocks of int8 have a scale for each token and head.
    """
    if scales is None:
        blocks.flatten(0, 1)[slots] = new.to(blocks.dtype)
        return
    most = new.float().abs().amax(-1)
    scale = torch.where(most > 0, most / 127.0, 1.0)
    scales.flatten(0, 1)[slots] = scale
    blocks.flatten(0, 1)[slots] = (new.float() / scale[..., None]).round().to(torch.int8)


def alibi_slopes(heads: int, rounded: bool = False) -> Tensor:
    """Compute the ALiBi slopes of `heads` heads, fp32 [heads], bf16 if rounded.

    Press et al. 2022, "Train Short, Test Long": powers of 2^(-8/n); for n not a power of two filled up from 2n.
    """
    nearest = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-8.0 / nearest)
    slopes = [base ** (i + 1) for i in range(nearest)]
    base = 2.0 ** (-4.0 / nearest)
    slopes += [base ** (2 * i + 1) for i in range(heads - nearest)]
    return torch.tensor(slopes, dtype=torch.bfloat16 if rounded else torch.float32)


def attend(
    q: Tensor,
    cache: tuple[Tensor, ...],
    batch: BatchIndices,
    spec: AttentionSpec,
    extra: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Compute the attention of each token over its sequence in the KV cache.

    Args:
        q: [T, heads, width].
        cache: Keys [blocks, size, kv heads, width] and values [blocks, size, kv heads, value width]; the batch's own
        are there. Of
            int8, scales fp32 [blocks, size, kv heads] of both follow.
        extra: ALiBi slopes [heads] and sinks [heads], or None.
    Returns: [T, heads, value width].
    Cost: reads each sequence's keys and values once, and copies those of one-token chunks.
    """
    out = q.new_empty(q.shape[0], spec.heads, spec.value_width)
    keys, values, *scales = cache

    def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
        if not scales:
            return keys[blocks], values[blocks]
        dequantized = (t[blocks] * s[blocks][..., None] for t, s in zip((keys, values), scales, strict=True))
        k, v = (t.to(q.dtype) for t in dequantized)
        return k, v

    if batch.single:
        rows = batch.tables.shape[1] * keys.shape[1]
        k, v = (t.view(batch.single, rows, *t.shape[-2:]) for t in read(batch.tables))
        at = torch.arange(rows, device=q.device)
        queries = (batch.lengths - 1)[:, None]
        out[: batch.single] = _core(q[: batch.single, None], k, v, (queries, at), spec, extra)[:, 0]
    for first, count, start, blocks in batch.spans:
        length = start + count
        k, v = (t.view(1, -1, *t.shape[-2:])[:, :length] for t in read(blocks))
        if start == 0 and q.device.type != "cpu" and _plain(spec, extra, length):
            queries, ks, vs = (t.transpose(1, 2) for t in (q[None, first : first + count], k, v))
            many = spec.heads != spec.kv_heads
            attended = F.scaled_dot_product_attention(
                queries, ks, vs, is_causal=True, scale=spec.scale, enable_gqa=many
            )
            out[first : first + count] = attended[0].transpose(0, 1)
            continue
        at = torch.arange(length, device=q.device)
        out[first : first + count] = _core(q[None, first : first + count], k, v, (at[None, start:], at), spec, extra)[0]
    return out


def _plain(spec: AttentionSpec, extra: tuple[Tensor | None, Tensor | None], length: int) -> bool:
    """Whether each token sees all before it and nothing else changes scores: a device has one kernel for that, without a mask."""
    return all(t is None for t in extra) and spec.softcap is None and (spec.window is None or length <= spec.window)


def _core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    extra: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Compute causal attention of q [B, n, heads, width] over k and v [B, L, kv heads, .].

    `positions` are those of queries [B, n] and of keys [L]. Returns [B, n, heads, .].
    """
    (query_positions, at), (slopes, sinks) = positions, extra
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    distance = query_positions[..., None] - at
    visible = distance >= 0
    if spec.window is not None:
        visible &= distance < spec.window
    mask = visible[:, None]
    if spec.softcap is None and sinks is None:
        if slopes is not None and spec.alibi is not None:
            bias = (slopes[:, None] * at).float() * spec.alibi.scale
            mask = bias[:, None].masked_fill(~mask, -math.inf).to(q.dtype)
        many = spec.heads != spec.kv_heads
        return F.scaled_dot_product_attention(q, k, v, mask, scale=spec.scale, enable_gqa=many).transpose(1, 2)
    groups = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        more = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        shares = torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1]
    else:
        shares = torch.softmax(scores, -1)
    return (shares.to(v.dtype) @ v).transpose(1, 2)
