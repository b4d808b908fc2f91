"""Attention over a paged cache: a ragged batch of chunks, each reads the blocks of its own sequence.

One call computes prompts, chunks, decode rows and drafts. On a GPU it is a Triton kernel that reads the blocks where they are
(`ds_ops.triton_kernels`); the reference, for the CPU, for tests and for devices without Triton, gathers them in plain torch: the
chunks that bring one token together, over a table of blocks padded to the longest of them; the others one by one. Which one runs is a
`Backend` of `ATTENTION`, whose obstacle says why it cannot. Scores are softmaxed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_accel import streams
from ds_inference.flashinfer_attention import (
    FlashInferBatch,
    flashinfer_attend,
    flashinfer_obstacle,
    flashinfer_reads,
)
from ds_inference.scheduler import ScheduledChunk
from ds_inference.spec import AttentionSpec
from ds_inference.varlen_attention import varlen_attend, varlen_obstacle, varlen_reads
from ds_ops.registry import Backend, Op, choose, reference_backend
from ds_ops.triton_kernels.kernel_arguments import AttentionTraits, PagedMetadata
from ds_ops.triton_kernels.triton_support import triton_obstacle

__all__ = [
    "ATTENTION",
    "BatchIndices",
    "alibi_slopes",
    "attend",
    "captures_in_place",
    "index_chunks",
    "keep",
    "make_batch",
    "to_batch",
]

Extra = tuple[Tensor | None, Tensor | None]
_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Formats of a cache of 8 bits, which has a scale for each token and head, and their largest value."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchIndices:
    """A step's chunks as indices. T tokens of B sequences, of which the first `num_decodes` bring one token each.

    All tensors are int32, parts of one buffer that is copied to the device at once.

    Attributes:
        tokens, positions: [T].
        slots: [T]: where each token's keys and values go, block * size + offset.
        outputs: [R]: tokens whose distribution is wanted, in order of the sequences.
        cu_seqlens_q: [B + 1]: the first token of each sequence, and T.
        seqlens_k: [B]: tokens of each sequence in the cache, those of the batch included.
        block_table: [B, M]: the sequences' blocks, padded with block 0.
        max_seqlen_q: No sequence brings more tokens.
        chunks: The sequences as numbers of the host: (first token, tokens, position of the first, blocks). Empty while a CUDA graph
            is captured, which serves other numbers as well.
        worn: Adapters, and int64 [.] which tokens wear each.
        likeliest: See `SchedulerOutput`.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    outputs: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    num_decodes: int
    max_seqlen_q: int
    chunks: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    worn: tuple[tuple[str, Tensor], ...] = ()
    likeliest: bool = False


@dataclass(frozen=True, slots=True)
class ChunkIndices:
    """The integers of a batch on the host: what `BatchIndices` holds as tensors, by the same names."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    outputs: list[int]
    cu_seqlens_q: list[int]
    seqlens_k: list[int]
    chunks: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    num_decodes: int


def index_chunks(chunks: Sequence[ScheduledChunk], size: int) -> tuple[ChunkIndices, list[ScheduledChunk]]:
    """Compute the indices of a batch, and return its chunks in the order to which `outputs` belong: decode rows first.

    size: tokens of a block.
    """
    order = [c for c in chunks if len(c.tokens) == 1] + [c for c in chunks if len(c.tokens) != 1]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    starts, numbers = [0], []
    for chunk in order:
        first, count = len(tokens), len(chunk.tokens)
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.start + count)
        slots += [chunk.blocks[at // size] * size + at % size for at in range(chunk.start, chunk.start + count)]
        outputs += range(first + count - chunk.outputs, first + count)
        numbers.append((first, count, chunk.start, tuple(chunk.blocks)))
        starts.append(first + count)
    lengths = [start + count for _, count, start, _ in numbers]
    single = sum(len(c.tokens) == 1 for c in order)
    return ChunkIndices(tokens, positions, slots, outputs, starts, lengths, tuple(numbers), single), order


def to_batch(indices: ChunkIndices, device: torch.device) -> BatchIndices:
    """Copy the indices to the device, all at once; the tensors are valid on the current stream."""
    longest = max((len(blocks) for *_, blocks in indices.chunks), default=0)
    tables = [t for *_, blocks in indices.chunks for t in (*blocks, *([0] * (longest - len(blocks))))]
    rows = [
        indices.tokens,
        indices.positions,
        indices.slots,
        indices.outputs,
        indices.cu_seqlens_q,
        indices.seqlens_k,
        tables,
    ]
    buffer = torch.tensor([n for row in rows for n in row], dtype=torch.int32, device="cpu")
    if device.type != "cpu":
        buffer = streams.copy_to(streams.pin(buffer), device)
    parts = buffer.split([len(row) for row in rows])
    tokens, positions, slots, outputs, starts, lengths, table = parts
    return BatchIndices(
        tokens,
        positions,
        slots,
        outputs,
        starts,
        lengths,
        table.view(len(indices.chunks), longest),
        indices.num_decodes,
        max((count for _, count, _, _ in indices.chunks), default=0),
        indices.chunks,
    )


def make_batch(
    chunks: Sequence[ScheduledChunk], size: int, device: torch.device
) -> tuple[BatchIndices, list[ScheduledChunk]]:
    """Build the batch, and return its chunks in the order to which `outputs` belong (`index_chunks`, `to_batch`)."""
    indices, order = index_chunks(chunks, size)
    return to_batch(indices, device), order


def keep(new: Tensor, slots: Tensor, blocks: Tensor, scales: Tensor | None) -> None:
    """Write keys or values [T, heads, width] into the KV cache's blocks [blocks, size, heads, width].

    Blocks of int8 and of fp8 (e4m3) have a scale for each token and head.
    """
    if scales is None:
        blocks.flatten(0, 1)[slots] = new.to(blocks.dtype)
        return
    most, largest = new.float().abs().amax(-1), _CODES[blocks.dtype]
    scale = torch.where(most > 0, most / largest, 1.0)
    scales.flatten(0, 1)[slots] = scale
    codes = (new.float() / scale[..., None]).clamp(-largest, largest)
    if blocks.dtype == torch.int8:
        blocks.flatten(0, 1)[slots] = codes.round().to(torch.int8)
    else:  # torch indexes bytes everywhere, floats of 8 bits not
        blocks.view(torch.uint8).flatten(0, 1)[slots] = codes.to(blocks.dtype).view(torch.uint8)


def alibi_slopes(heads: int, rounded: bool = False) -> Tensor:
    """Compute the ALiBi slopes of `heads` heads, fp32 [heads], bf16 if rounded.

    Press et al. 2022, "Train Short, Test Long": powers of 2^(-8/n); for n not a power of two filled up from 2n.
    """
    nearest = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-8.0 / nearest)
    slopes = [base ** (i + 1) for i in range(nearest)]
    base = 2.0 ** (-4.0 / nearest)
    slopes += [base ** (2 * i + 1) for i in range(heads - nearest)]
    return torch.tensor(slopes, dtype=torch.bfloat16 if rounded else torch.float32, device="cpu")


def attend(
    q: Tensor, cache: tuple[Tensor, ...], batch: BatchIndices, spec: AttentionSpec, extra: Extra = (None, None)
) -> Tensor:
    """Compute the attention of each token over its sequence in the KV cache.

    Args:
        q: [T, heads, width].
        cache: Keys [blocks, size, kv heads, width] and values [blocks, size, kv heads, value width]; the batch's own are there. Of
            int8 and fp8, scales fp32 [blocks, size, kv heads] of both follow.
        extra: ALiBi slopes [heads] and sinks [heads], or None.
    Returns: [T, heads, value width], valid on the current stream.
    Cost: reads each sequence's keys and values once; the reference also copies those of decode rows.
    """
    out: Tensor = choose(ATTENTION, q.device.type, q.dtype).backend.run(q, cache, batch, spec, extra)
    return out


def _attend_triton(
    q: Tensor, cache: tuple[Tensor, ...], batch: BatchIndices, spec: AttentionSpec, extra: Extra
) -> Tensor:
    """Read the blocks where they are: decode rows in one call, chunks of several tokens in another."""
    from ds_ops.triton_kernels.triton_attention import paged_attention

    alibi, (slopes, sinks) = spec.alibi, extra
    traits = AttentionTraits(
        spec.scale,
        spec.window or 0,
        spec.softcap or 0.0,
        slopes if alibi is not None else None,
        1.0 if alibi is None else alibi.scale,
        alibi is not None and alibi.rounded,
        sinks,
    )
    q = q.contiguous()
    out = q.new_empty(q.shape[0], spec.heads, spec.value_width)
    single, sequences, tokens = batch.num_decodes, len(batch.seqlens_k), q.shape[0]
    for rows, longest, count in (
        (slice(0, single), 1, single),
        (slice(single, sequences), batch.max_seqlen_q, tokens - single),
    ):
        if rows.start < rows.stop:
            starts = batch.cu_seqlens_q[rows.start : rows.stop + 1]
            metadata = PagedMetadata(starts, batch.seqlens_k[rows], batch.block_table[rows], longest, count)
            paged_attention(q, cache, metadata, traits, out)
    return out


def _attend_by_gather(
    q: Tensor, cache: tuple[Tensor, ...], batch: BatchIndices, spec: AttentionSpec, extra: Extra
) -> Tensor:
    """Copy the blocks of each sequence to one piece and attend in plain torch."""
    out = q.new_empty(q.shape[0], spec.heads, spec.value_width)
    keys, values, *scales = cache
    single = batch.num_decodes

    def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
        if not scales:
            return keys[blocks].to(q.dtype), values[blocks].to(q.dtype)
        codes = (
            t[blocks] if t.dtype == torch.int8 else t.view(torch.uint8)[blocks].view(t.dtype).float()
            for t in (keys, values)
        )
        k, v = ((t * s[blocks][..., None]).to(q.dtype) for t, s in zip(codes, scales, strict=True))
        return k, v

    if not batch.chunks and single < len(
        batch.seqlens_k
    ):  # while a graph is captured: all sequences bring as many tokens
        count, each, rows = len(batch.seqlens_k), batch.max_seqlen_q, batch.block_table.shape[1] * keys.shape[1]
        k, v = (t.view(count, rows, *t.shape[-2:]) for t in read(batch.block_table))
        at = torch.arange(rows, device=q.device)
        queries = (batch.seqlens_k[:, None] - each + at[:each]).clamp_min(
            0
        )  # what is padded in front sees something, too
        return _core(q.view(count, each, *q.shape[1:]), k, v, (queries, at), spec, extra).flatten(0, 1)
    if single:
        most = max((len(blocks) for *_, blocks in batch.chunks[:single]), default=batch.block_table.shape[1])
        rows = most * keys.shape[1]
        k, v = (t.view(single, rows, *t.shape[-2:]) for t in read(batch.block_table[:single, :most]))
        at = torch.arange(rows, device=q.device)
        queries = (batch.seqlens_k[:single] - 1)[:, None]
        out[:single] = _core(q[:single, None], k, v, (queries, at), spec, extra)[:, 0]
    for i, (first, count, start, numbers) in enumerate(batch.chunks[single:], single):
        length, blocks = start + count, batch.block_table[i, : len(numbers)]
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


def _attend_varlen(
    q: Tensor, cache: tuple[Tensor, ...], batch: BatchIndices, spec: AttentionSpec, extra: Extra
) -> Tensor:
    if not varlen_reads(spec, cache, extra):
        return _attend_by_gather(q, cache, batch, spec, extra)
    metadata = batch.cu_seqlens_q, batch.seqlens_k, batch.block_table, batch.max_seqlen_q
    return varlen_attend(q.contiguous(), cache, metadata, spec)


def _attend_flashinfer(
    q: Tensor, cache: tuple[Tensor, ...], batch: BatchIndices, spec: AttentionSpec, extra: Extra
) -> Tensor:
    if not batch.chunks or not flashinfer_reads(spec, cache, extra):  # a captured step has no numbers on the host
        other = _attend_by_gather if triton_obstacle(q.device.type, q.dtype) else _attend_triton
        return other(q, cache, batch, spec, extra)
    numbers = batch.chunks
    starts = [first for first, *_ in numbers] + [q.shape[0]]
    lengths = [start + count for _, count, start, _ in numbers]
    where = FlashInferBatch(batch, starts, lengths, [blocks for *_, blocks in numbers])
    return flashinfer_attend(q.contiguous(), cache, where, spec)


ATTENTION = Op(
    "paged_attention",
    "attention of a ragged batch over a paged cache",
    (
        Backend("triton", _attend_triton, triton_obstacle),
        Backend("flashinfer", _attend_flashinfer, flashinfer_obstacle),
        Backend("varlen", _attend_varlen, varlen_obstacle),
        reference_backend(_attend_by_gather),
    ),
)


def captures_in_place(device_type: str, dtype: torch.dtype) -> bool:
    """Whether attention in a captured step reads blocks where they are, so that a graph serves any number of blocks."""
    backend = choose(ATTENTION, device_type, dtype).backend.name
    return backend == "triton" or (backend == "flashinfer" and not triton_obstacle(device_type, dtype))


def _plain(spec: AttentionSpec, extra: Extra, length: int) -> bool:
    """Whether each token sees all before it and nothing else changes scores: a device has one kernel for that, without a mask."""
    return all(t is None for t in extra) and spec.softcap is None and (spec.window is None or length <= spec.window)


def _core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: tuple[Tensor, Tensor],
    spec: AttentionSpec,
    extra: Extra,
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
