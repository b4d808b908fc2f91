"""Attention over a paged cache in one call for prompts, chunks, decode rows and drafts, split over keys (Flash-Decoding, Dao et al. 2023).

A program computes BLOCK_M rows: some tokens of one sequence times the query heads that share a key head, so that keys are read once for
all of them. Where programs are few, each sequence's keys are split over several, and a second kernel adds up what they give. How many
programs there are depends on numbers of rows only, never on lengths: a CUDA graph of some rows serves any lengths.

Softmax in fp32, base 2, with a running maximum (Milakov and Gimelshein 2018). Codes of 8 bits are multiplied as they are; the scale of
a key joins its score, that of a value joins its probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.triton_kernels.kernel_arguments import AttentionTraits, PagedMetadata
from ds_ops.triton_kernels.triton_support import launch, multiprocessors, next_power

__all__ = ["AttentionTuning", "paged_attention", "plan_attention"]

_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """How the kernel is laid out: decided from shapes alone.

    Attributes:
        rows: Of a program (BLOCK_M): tokens times heads.
        heads: Query heads of a program; a group of more is cut.
        tokens: Query tokens of a program.
        tile: Keys of a turn of the loop.
        splits: Programs that share the keys of one sequence.
        warps, stages: Of the compiled kernel.
    """

    rows: int
    heads: int
    tokens: int
    tile: int
    splits: int
    warps: int
    stages: int


def plan_attention(
    rows: tuple[int, int, int], heads: tuple[int, int], sizes: tuple[int, int, int, int], room: int
) -> AttentionTuning:
    """Choose the layout.

    Args:
        rows: Tokens of q, sequences, and tokens of the longest of them in q.
        heads: Of queries and of keys.
        sizes: Features of a key and of a value, and bytes of one of q and of one in the cache.
        room: Programs that the device runs side by side.
    """
    (tokens, sequences, longest), group = rows, heads[0] // heads[1]
    features, fp32 = max(sizes[:2]), sizes[2] == 4
    wide, middle = features > 256, features > 128 or fp32
    heavy = middle or sizes[3] < sizes[2]  # registers: a thread's part of the sums, and of what codes become
    # fp32 is multiplied by no tensor core: its operands are in registers, and those of more rows would not fit. Rows of q and tiles of
    # keys fit into 99 KiB of shared memory, which a block has on cards for workstations.
    most = 16 if wide else 32 if fp32 else 64 if heavy else 128
    block = max(16, min(most, next_power(min(group, most) * longest)))
    per_program = min(group, block)
    query_tokens = block // per_program
    blocks = sequences if longest == 1 else tokens // query_tokens + sequences
    programs = blocks * heads[1] * -(-group // per_program)
    splits = next_power(max(1, min(_MOST_SPLITS, 2 * room // max(1, programs))))
    return AttentionTuning(
        block,
        per_program,
        query_tokens,
        16 if fp32 and features > 64 else 32 if wide or middle else 64,
        splits,
        8 if wide or block > 64 or (block == 64 and heavy) or (block == 32 and fp32) else 4,
        1 if wide and fp32 else 2,
    )


def paged_attention(
    q: Tensor, cache: tuple[Tensor, ...], metadata: PagedMetadata, traits: AttentionTraits, out: Tensor | None = None
) -> Tensor:
    """Compute the attention of each token over its sequence's keys and values in the cache.

    Args:
        q: bf16, fp16 or fp32 [T, heads, width], contiguous.
        cache: Keys [blocks, size, kv heads, width] and values [blocks, size, kv heads, value width], of q's dtype; of int8 or fp8
            (e4m3), fp32 scales [blocks, size, kv heads] of both follow. Values may be a view of keys.
        out: [T, heads, value width], of q's dtype, contiguous: rows of the sequences are written; None: a new one.
    Returns: `out`, valid on the current stream. Of a new one, rows that belong to no sequence are undefined.
    Cost: each sequence's keys and values are read once for every BLOCK_M rows; split, fp32 partial sums are written and read once.
    """
    keys, values, *scales = cache
    (tokens, heads, width), (_, size, kv_heads, value_width) = q.shape, values.shape
    if out is None:
        out = q.new_empty(tokens, heads, value_width)
    sequences = len(metadata.seqlens_k)
    if not metadata.num_tokens or not sequences:
        return out
    group, one = heads // kv_heads, metadata.max_seqlen_q == 1
    rows = (metadata.num_tokens, sequences, metadata.max_seqlen_q)
    plan = plan_attention(
        rows, (heads, kv_heads), (width, value_width, q.element_size(), keys.element_size()), multiprocessors(q.device)
    )
    blocks_q = sequences if one else metadata.num_tokens // plan.tokens + sequences
    chunks = -(-group // plan.heads)
    first, rest = _parts(width)
    value_block = max(16, next_power(value_width))
    partial, sums = out, out
    if plan.splits > 1:
        partial = torch.empty(tokens, heads, plan.splits, value_width, dtype=torch.float32, device=q.device)
        sums = torch.empty(tokens, heads, plan.splits, 2, dtype=torch.float32, device=q.device)
    codes = 0 if not scales else 1 if keys.dtype == torch.int8 else 2
    if codes == 2:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    slopes, sinks = traits.slopes, traits.sinks
    launch(
        _attend,
        (blocks_q, kv_heads * chunks, plan.splits),
        q, keys, values, scales[0] if scales else q, scales[1] if scales else q,
        out, partial, sums,
        metadata.cu_seqlens_q, metadata.seqlens_k, metadata.block_table,
        q if slopes is None else slopes, q if sinks is None else sinks,
        sequences, metadata.block_table.stride(0), keys.stride(1), values.stride(1), keys.stride(2), values.stride(2),
        traits.scale, traits.softcap, traits.alibi_scale,
        HEADS=heads, KV_HEADS=kv_heads, CHUNKS=chunks, WIDTH=width, VALUE_WIDTH=value_width, SIZE=size,
        D1=first, D2=rest, DV=value_block,
        BLOCK_M=plan.rows, BLOCK_Q=plan.tokens, BLOCK_H=plan.heads, TILE=plan.tile, SPLITS=plan.splits,
        ONE=one, WINDOW=traits.window, SOFTCAP=traits.softcap > 0, CODES=codes,
        ALIBI=0 if slopes is None else 2 if traits.alibi_rounded else 1, SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.splits > 1:
        launch(
            _combine,
            (metadata.num_tokens, heads),
            partial, sums, out, metadata.cu_seqlens_q, q if sinks is None else sinks,
            sequences,
            HEADS=heads, VALUE_WIDTH=value_width, DV=value_block, SPLITS=plan.splits, SINKS=sinks is not None,
            num_warps=4,
        )  # fmt: skip
    return out


def _parts(width: int) -> tuple[int, int]:
    """Return two powers of two that hold `width` features with little padding: (512, 64) for 576; the second is 0 where one does."""
    first = next_power(width)
    if first == width or width < 32:
        return max(16, first), 0
    half = first // 2
    rest = max(16, next_power(width - half))
    return (first, 0) if half + rest >= first else (half, rest)


@triton.jit(  # what changes from step to step: another kernel for each of its kinds would be compiled in the midst of serving
    do_not_specialize=["sequences", "table_stride"],
    do_not_specialize_on_alignment=["cu_ptr", "lengths_ptr", "table_ptr"],
)
def _attend(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    out_ptr, partial_ptr, sums_ptr,
    cu_ptr, lengths_ptr, table_ptr,
    slopes_ptr, sinks_ptr,
    sequences, table_stride, key_stride, value_stride, key_head_stride, value_head_stride,
    scale, softcap, alibi_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SIZE: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    ONE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CODES: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the rows of one program over its part of the keys."""
    LOG2E: tl.constexpr = 1.4426950408889634
    GROUP: tl.constexpr = HEADS // KV_HEADS
    block = tl.program_id(0)
    kv_head = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    split = tl.program_id(2)
    if ONE:
        sequence = block
        local = 0
    else:  # sequence i has blocks from cu[i] // BLOCK_Q + i on, which leaves each enough of them
        base = tl.load(cu_ptr)
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            begins = (tl.load(cu_ptr + middle) - base) // BLOCK_Q + middle
            if begins <= block:
                low = middle
            else:
                high = middle
        sequence = low
        local = block - ((tl.load(cu_ptr + sequence) - base) // BLOCK_Q + sequence)
    q_begin = tl.load(cu_ptr + sequence)
    q_count = tl.load(cu_ptr + sequence + 1) - q_begin
    q_first = local * BLOCK_Q
    if q_first < q_count:
        length = tl.load(lengths_ptr + sequence)
        context = length - q_count
        m = tl.arange(0, BLOCK_M)
        token = q_first + m // BLOCK_H
        in_group = chunk * BLOCK_H + m % BLOCK_H
        head = kv_head * GROUP + in_group
        valid = (m < BLOCK_Q * BLOCK_H) & (token < q_count) & (in_group < GROUP)
        if (
            ONE and SINKS
        ):  # the same in all rows, so that no vector is kept through the loop; other kernels get no smaller by it
            position = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
        else:
            position = context + token
        d1 = tl.arange(0, D1)
        q_row = q_ptr + ((q_begin + token).to(tl.int64) * HEADS + head) * WIDTH
        q1 = tl.load(q_row[:, None] + d1[None, :], mask=valid[:, None] & (d1 < WIDTH)[None, :], other=0.0)
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            q2 = tl.load(q_row[:, None] + d2[None, :], mask=valid[:, None] & (d2 < WIDTH)[None, :], other=0.0)
        if ALIBI > 0:
            slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)
        dv = tl.arange(0, DV)

        last = context + tl.minimum(q_first + BLOCK_Q, q_count)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(0, context + q_first - WINDOW + 1)
        tile_first = first // TILE
        tile_end = (last + TILE - 1) // TILE
        if SPLITS > 1:
            share = (tile_end - tile_first + SPLITS - 1) // SPLITS
            tile_first = tile_first + split * share
            tile_end = tl.minimum(tile_first + share, tile_end)

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV], tl.float32)
        for tile in range(tile_first, tile_end):
            n = tile * TILE + tl.arange(0, TILE)
            there = n < last
            physical = tl.load(table_ptr + sequence * table_stride + n // SIZE, mask=there, other=0)
            slot = physical.to(tl.int64) * SIZE + n % SIZE
            k_row = key_ptr + slot * key_stride + kv_head * key_head_stride
            k1 = tl.load(k_row[:, None] + d1[None, :], mask=there[:, None] & (d1 < WIDTH)[None, :], other=0)
            if CODES == 2:  # e4m3 bits in the place of fp16's, 256 times too small: the scale makes up for it
                wide = k1.to(tl.int16)
                k1 = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
            if CODES == 1:
                k1 = k1.to(tl.float32)
            scores = tl.dot(q1, tl.trans(k1.to(q1.dtype)), input_precision=PRECISION)
            if D2 > 0:
                k2 = tl.load(k_row[:, None] + d2[None, :], mask=there[:, None] & (d2 < WIDTH)[None, :], other=0)
                if CODES == 2:
                    wide2 = k2.to(tl.int16)
                    k2 = (((wide2 & 0x80) << 8) | ((wide2 & 0x7F) << 7)).to(tl.float16, bitcast=True)
                if CODES == 1:
                    k2 = k2.to(tl.float32)
                scores += tl.dot(q2, tl.trans(k2.to(q2.dtype)), input_precision=PRECISION)
            if CODES > 0:
                k_scale = tl.load(key_scale_ptr + slot * KV_HEADS + kv_head, mask=there, other=0.0)
                if CODES == 2:
                    k_scale = k_scale * 256.0
                scores = scores * k_scale[None, :]
            scores = scores * scale
            if SOFTCAP:
                scores = softcap * (2.0 / (1.0 + tl.exp2(-2.0 * LOG2E * scores / softcap)) - 1.0)
            if ALIBI == 1:
                scores += (slope[:, None].to(tl.float32) * n[None, :].to(tl.float32)) * alibi_scale
            if (
                ALIBI == 2
            ):  # position and product are rounded to bf16, in integers: to the nearest everywhere, halves to even
                number = n.to(tl.float32).to(tl.int32, bitcast=True)
                number = (number + 0x7FFF + ((number >> 16) & 1)) & -65536
                product = slope[:, None].to(tl.float32) * number.to(tl.float32, bitcast=True)[None, :]
                bits = product.to(tl.int32, bitcast=True)
                bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
                scores += bits.to(tl.float32, bitcast=True) * alibi_scale
            visible = there[None, :] & (n[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (position[:, None] - n[None, :] < WINDOW)
            scores = tl.where(visible, scores * LOG2E, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            p = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(best - safe)
            total = total * shrink + tl.sum(p, 1)
            best = new_best
            v_row = value_ptr + slot * value_stride + kv_head * value_head_stride
            v = tl.load(v_row[:, None] + dv[None, :], mask=there[:, None] & (dv < VALUE_WIDTH)[None, :], other=0)
            if CODES == 2:
                wide3 = v.to(tl.int16)
                v = (((wide3 & 0x80) << 8) | ((wide3 & 0x7F) << 7)).to(tl.float16, bitcast=True)
            if CODES == 1:
                v = v.to(tl.float32)
            if CODES > 0:
                v_scale = tl.load(value_scale_ptr + slot * KV_HEADS + kv_head, mask=there, other=0.0)
                if CODES == 2:
                    v_scale = v_scale * 256.0
                p = p * v_scale[None, :]
            acc = acc * shrink[:, None]
            acc += tl.dot(p.to(q1.dtype), v.to(q1.dtype), input_precision=PRECISION)

        row = (q_begin + token).to(tl.int64) * HEADS + head
        written = valid[:, None] & (dv < VALUE_WIDTH)[None, :]
        if SPLITS > 1:
            at = row * SPLITS + split
            tl.store(partial_ptr + at[:, None] * VALUE_WIDTH + dv[None, :], acc, mask=written)
            tl.store(sums_ptr + at * 2, best, mask=valid)
            tl.store(sums_ptr + at * 2 + 1, total, mask=valid)
        else:
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                most = tl.maximum(best, sink)
                shrink = tl.exp2(best - most)
                total = total * shrink + tl.exp2(sink - most)
                acc = acc * shrink[:, None]
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + row[:, None] * VALUE_WIDTH + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["cu_ptr"])
def _combine(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    partial_ptr, sums_ptr, out_ptr, cu_ptr, sinks_ptr, sequences,
    HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of one token and head."""
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(1)
    token = tl.load(cu_ptr) + tl.program_id(0)
    if token < tl.load(cu_ptr + sequences):
        row = token.to(tl.int64) * HEADS + head
        s = tl.arange(0, SPLITS)
        dv = tl.arange(0, DV)
        best = tl.load(sums_ptr + (row * SPLITS + s) * 2)
        total = tl.load(sums_ptr + (row * SPLITS + s) * 2 + 1)
        most = tl.max(best, 0)
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            most = tl.maximum(most, sink)
        weight = tl.where(total > 0.0, tl.exp2(best - most), 0.0)
        whole = tl.sum(weight * total, 0)
        if SINKS:
            whole += tl.exp2(sink - most)
        there = (total > 0.0)[:, None] & (dv < VALUE_WIDTH)[None, :]
        parts = tl.load(partial_ptr + (row * SPLITS + s)[:, None] * VALUE_WIDTH + dv[None, :], mask=there, other=0.0)
        y = tl.sum(parts * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out_ptr + row * VALUE_WIDTH + dv, y.to(out_ptr.dtype.element_ty), mask=dv < VALUE_WIDTH)
