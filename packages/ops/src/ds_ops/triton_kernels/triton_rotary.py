"""From the product of a layer's attention input to queries, and keys and values in the cache, in one kernel.

A program takes one token and one head: norm of the head where there is one (Qwen 3), rotation (Su et al. 2021), then queries go to a
tensor of their own, keys and values to their slot of the paged cache, as codes with a scale where the cache has 8 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.triton_kernels.kernel_arguments import HeadTraits
from ds_ops.triton_kernels.triton_support import launch, next_power

__all__ = ["rotary_write"]


def rotary_write(
    qkv: Tensor, tables: tuple[Tensor, Tensor] | None, slots: Tensor, cache: tuple[Tensor, ...], traits: HeadTraits
) -> Tensor:
    """Make queries, and write keys and values into the cache; valid on the current stream.

    Args:
        qkv: [T, heads * width + kv heads * (width + value width)], bf16, fp16 or fp32, contiguous.
        tables: cos and sin [T, rotary / 2] in any float dtype, contiguous; None: nothing is rotated.
        slots: int32 [T], block * size + offset of each token.
        cache: As `paged_attention` reads it.
    Returns: Queries [T, heads, width].
    Cost: one launch; each number is read and written once.
    """
    keys, values, *scales = cache
    tokens, width, value_width = qkv.shape[0], keys.shape[-1], values.shape[-1]
    q = torch.empty(tokens, traits.heads, width, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    codes = 0 if not scales else 1 if keys.dtype == torch.int8 else 2
    if codes == 2:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    cos, sin = (qkv, qkv) if tables is None else tables
    launch(
        _rotary_write,
        (tokens, traits.heads + 2 * traits.kv_heads),
        qkv, cos, sin, slots, q, keys, values, scales[0] if scales else q, scales[1] if scales else q,
        qkv if traits.q_norm is None else traits.q_norm, qkv if traits.k_norm is None else traits.k_norm,
        traits.eps, traits.offset,
        HEADS=traits.heads, KV_HEADS=traits.kv_heads, WIDTH=width, VALUE_WIDTH=value_width,
        ROTARY=traits.rotary if tables is not None else 0, INTERLEAVED=traits.interleaved,
        NORM=0 if traits.q_norm is None else 2 if traits.offset else 1, CODES=codes,
        BLOCK=next_power(max(width, value_width)), num_warps=1 if max(width, value_width) <= 128 else 2,
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # it changes from step to step
def _rotary_write(  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    q_norm_ptr, k_norm_ptr, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make one head of one token: first the heads of queries, then those of keys, then those of values."""
    FEATURES: tl.constexpr = (HEADS + KV_HEADS) * WIDTH + KV_HEADS * VALUE_WIDTH
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    heads = head + tl.zeros([BLOCK], tl.int32)  # predicates are blocks, so that they join masks of blocks
    is_query = heads < HEADS
    is_value = heads >= HEADS + KV_HEADS
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    kv_head = (head - HEADS + HEADS * KV_HEADS) % KV_HEADS
    start = tl.where(is_value, (HEADS + KV_HEADS) * WIDTH + kv_head * VALUE_WIDTH, head * WIDTH)
    row = qkv_ptr + token * FEATURES + start
    there = i < tl.where(is_value, VALUE_WIDTH, WIDTH)
    stored = tl.load(row + i, mask=there, other=0.0)
    x = stored.to(tl.float32)
    if NORM > 0:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
        q_weight = tl.load(q_norm_ptr + i, mask=there & is_query, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + i, mask=there & is_key, other=0.0).to(tl.float32)
        normal = x * factor
        if NORM == 1:
            normal = normal.to(stored.dtype).to(tl.float32) * (q_weight + k_weight)
        else:
            normal = normal * (offset + q_weight + k_weight)
        x = tl.where(is_value, x, normal.to(stored.dtype).to(tl.float32))
    if ROTARY > 0:  # the other feature of each pair is read again, and normed likewise
        HALF: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            other = i ^ 1
            pair = i // 2
            second = (i % 2) == 1
        else:
            second = i >= HALF
            other = tl.where(second, i - HALF, i + HALF)
            pair = tl.where(second, i - HALF, i)
        turns = (i < ROTARY) & (heads < HEADS + KV_HEADS)
        y = tl.load(row + other, mask=turns, other=0.0).to(tl.float32)
        if NORM > 0:
            q_weight2 = tl.load(q_norm_ptr + other, mask=turns & is_query, other=0.0).to(tl.float32)
            k_weight2 = tl.load(k_norm_ptr + other, mask=turns & is_key, other=0.0).to(tl.float32)
            y = y * factor
            if NORM == 1:
                y = y.to(stored.dtype).to(tl.float32) * (q_weight2 + k_weight2)
            else:
                y = y * (offset + q_weight2 + k_weight2)
            y = y.to(stored.dtype).to(tl.float32)
        cos = tl.load(cos_ptr + token * HALF + pair, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * HALF + pair, mask=turns, other=0.0).to(tl.float32)
        x = tl.where(turns, x * cos + tl.where(second, y, -y) * sin, x)
    out = x.to(stored.dtype)
    tl.store(q_ptr + (token * HEADS + head) * WIDTH + i, out, mask=there & is_query)
    place = tl.load(slots_ptr + token).to(tl.int64) * KV_HEADS + kv_head
    if CODES > 0:
        LARGEST: tl.constexpr = 127.0 if CODES == 1 else 448.0
        x = out.to(tl.float32)
        most = tl.max(tl.abs(x), 0)
        step = tl.where(most > 0.0, most / LARGEST, 1.0)
        code = tl.minimum(tl.maximum(x / step, -LARGEST), LARGEST)
        if CODES == 1:  # adding and taking 1.5 * 2^23 rounds halves to even
            code8 = ((code + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            size = tl.abs(code)
            bits = size.to(tl.int32, bitcast=True)
            bits = bits + 0x7FFFF + ((bits >> 20) & 1)
            large = (bits >> 20) - (120 << 3)
            small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
            whole = tl.where(size < 0.015625, small, large)
            code8 = (whole | tl.where(code < 0.0, 0x80, 0)).to(tl.uint8)
        tl.store(key_ptr + place * WIDTH + i, code8, mask=there & is_key)
        tl.store(key_scale_ptr + place + 0 * i, step + 0.0 * x, mask=is_key & (i == 0))
        tl.store(value_ptr + place * VALUE_WIDTH + i, code8, mask=there & is_value)
        tl.store(value_scale_ptr + place + 0 * i, step + 0.0 * x, mask=is_value & (i == 0))
    else:
        tl.store(key_ptr + place * WIDTH + i, out, mask=there & is_key)
        tl.store(value_ptr + place * VALUE_WIDTH + i, out, mask=there & is_value)
