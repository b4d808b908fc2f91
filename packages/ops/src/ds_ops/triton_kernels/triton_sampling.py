"""From rows of logits to one token each, for a batch whose rows are sampled in ways of their own: four launches whatever the rows are.

The bounds of top-k and top-p are found without sorting, by the bits of the logits as ordered integers, two bits a pass: exact for top-k,
and for top-p up to the order in which probabilities are summed. Noise is Philox (Salmon et al. 2011) of (seed, position, token), so that a
draw depends on nothing else in the batch, and on no device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_ops.triton_kernels.kernel_arguments import PHILOX_ROUNDS, SAMPLING_FIELDS
from ds_ops.triton_kernels.triton_support import launch, multiprocessors, next_power

__all__ = ["adjust_logits", "draw_tokens"]

_BLOCK = 1024
_SEARCHED = 4096
"""Logits of a turn of a search, which one program makes for a row: it waits for memory once a turn, up to 33 times the row."""
_MOST_SPLITS = 32
_FIELDS = tl.constexpr(SAMPLING_FIELDS)
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)


def adjust_logits(logits: Tensor, entries: Tensor, most: float) -> None:
    """Apply penalties and biases to some logits, in place; valid on the current stream.

    Args:
        logits: fp32 [B, V], contiguous.
        entries: int32 [E, 5], contiguous: row, token, and the bits of three fp32: factor, amount, bias. A logit is divided by its factor
            if positive, else multiplied, then loses the amount and gains the bias. No token of a row occurs twice.
        most: What comes out is in [-most, most].
    """
    count = entries.shape[0]
    if count:
        floats = entries.view(torch.float32)
        launch(_adjust, (-(-count // 256),), logits, entries, floats, count, logits.shape[1], most, BLOCK=256)


def draw_tokens(logits: Tensor, params: Tensor) -> Tensor:
    """Choose a token of each row, int32 [B]; valid on the current stream.

    Args:
        logits: fp32 [B, V], contiguous, after penalties.
        params: int32 [B, 8], contiguous: top-k, position, both halves of the seed, and the bits of four fp32: the inverse of the
            temperature (0: the likeliest token is taken), top-p, the logarithm of min-p times the temperature, and the temperature.
    Cost: three launches. Reads logits twice, 16 times more each for top-k and top-p of rows that have them.
    """
    (rows, vocab), device = logits.shape, logits.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens
    splits = max(1, min(_MOST_SPLITS, 2 * multiprocessors(device) // rows, -(-vocab // (4 * _BLOCK))))
    bounds = torch.empty(rows, 2, dtype=torch.float32, device=device)
    best = torch.empty(rows, splits, dtype=torch.float32, device=device)
    at = torch.empty(rows, splits, dtype=torch.int32, device=device)
    floats = params.view(torch.float32)
    chunk = -(-vocab // (splits * 4 * _BLOCK)) * 4 * _BLOCK
    launch(_bounds, (rows,), logits, params, floats, bounds, vocab, BLOCK=_SEARCHED, num_warps=16)
    launch(
        _draw, (rows, splits), logits, params, floats, bounds, best, at, vocab, chunk, splits,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    launch(_pick, (rows,), best, at, tokens, splits, BLOCK=next_power(splits), num_warps=1)
    return tokens


@triton.jit(do_not_specialize=["count"])  # it changes from step to step
def _adjust(logits_ptr, entries_ptr, floats_ptr, count, vocab, most, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads tl.constexpr only
    """Change the logits of BLOCK entries."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    row = tl.load(entries_ptr + i * 5, mask=there, other=0).to(tl.int64)
    place = logits_ptr + row * vocab + tl.load(entries_ptr + i * 5 + 1, mask=there, other=0)
    factor = tl.load(floats_ptr + i * 5 + 2, mask=there, other=1.0)
    x = tl.load(place, mask=there, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x = x - tl.load(floats_ptr + i * 5 + 3, mask=there, other=0.0)
    x = x + tl.load(floats_ptr + i * 5 + 4, mask=there, other=0.0)
    tl.store(place, tl.minimum(tl.maximum(x, -most), most), mask=there)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Return fp32 as uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _search(row_ptr, vocab, target, floor, peak, inverse, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest ordered key such that the keys at least as large, and at least `floor`, weigh `target` together.

    A key weighs 1 if COUNT, else exp((logit - peak) * inverse).
    """
    one = tl.full((), 1, tl.uint32)
    prefix, bit = one - one, one << 30
    for _ in range(16):
        low, middle = prefix | bit, prefix | (bit << 1)
        high = low | middle
        bit = bit >> 2
        above_low = tl.zeros([BLOCK], tl.float32)
        above_middle = tl.zeros([BLOCK], tl.float32)
        above_high = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
            key = _ordered(x)
            weight = tl.where((at < vocab) & (key >= floor), 1.0, 0.0)
            if not COUNT:
                weight *= tl.exp((x - peak) * inverse)
            above_low += tl.where(key >= low, weight, 0.0)
            above_middle += tl.where(key >= middle, weight, 0.0)
            above_high += tl.where(key >= high, weight, 0.0)
        if tl.sum(above_high) >= target:
            prefix = high
        elif tl.sum(above_middle) >= target:
            prefix = middle
        elif tl.sum(above_low) >= target:
            prefix = low
    return prefix


@triton.jit
def _bounds(logits_ptr, params_ptr, floats_ptr, bounds_ptr, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the largest logit of one row, and the smallest that may be drawn."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")))
    peak = tl.max(largest)
    tl.store(bounds_ptr + row * 2, peak)
    inverse = tl.load(floats_ptr + row * _FIELDS + 4)
    bound = peak + tl.load(floats_ptr + row * _FIELDS + 6)
    if inverse > 0:
        top_k = tl.load(params_ptr + row * _FIELDS)
        floor = tl.full((), 0, tl.uint32)
        if (top_k > 0) & (top_k < vocab):
            floor = _search(row_ptr, vocab, top_k.to(tl.float32), floor, peak, inverse, True, BLOCK)
        top_p = tl.load(floats_ptr + row * _FIELDS + 5)
        if top_p < 1.0:
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
                sums += tl.where((at < vocab) & (_ordered(x) >= floor), tl.exp((x - peak) * inverse), 0.0)
            key = _search(row_ptr, vocab, top_p * tl.sum(sums), floor, peak, inverse, False, BLOCK)
            floor = tl.maximum(floor, key)
        bits = tl.where((floor >> 31) != 0, floor & 0x7FFFFFFF, floor ^ 0xFFFFFFFF)
        least = tl.where(floor == 0, float("-inf"), bits.to(tl.float32, bitcast=True))
        bound = tl.maximum(bound, least)
    tl.store(bounds_ptr + row * 2 + 1, bound)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    """Return -log of an exponential variable for each of 32 random bits. Near 0 it is a series: 1 - u would round."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.01, series, -tl.log(1.0 - u)))


@triton.jit(do_not_specialize=["chunk", "splits"])
def _draw(  # type: ignore[no-untyped-def]
    logits_ptr, params_ptr, floats_ptr, bounds_ptr, best_ptr, at_ptr, vocab, chunk, splits, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the largest score, and its token, of a part of one row: the logit, or what is allowed of it with noise."""
    row, split = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab
    position = tl.load(params_ptr + row * _FIELDS + 1).to(tl.uint32, bitcast=True)
    seed_low = tl.load(params_ptr + row * _FIELDS + 2).to(tl.uint32, bitcast=True)
    seed_high = tl.load(params_ptr + row * _FIELDS + 3).to(tl.uint32, bitcast=True)
    inverse = tl.load(floats_ptr + row * _FIELDS + 4)
    peak, bound = tl.load(bounds_ptr + row * 2), tl.load(bounds_ptr + row * 2 + 1)
    first, end = split * chunk, tl.minimum(vocab, split * chunk + chunk)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.minimum(first + 4 * lanes, vocab - 1)
    zero = lanes.to(tl.uint32) * 0
    for start in range(first, end, 4 * BLOCK):
        counter = (start // 4 + lanes).to(tl.uint32)
        random = tl.philox_impl(counter, zero + position, zero, zero, zero + seed_low, zero + seed_high, _ROUNDS)
        for j in tl.static_range(4):
            at = start + 4 * lanes + j
            x = tl.load(row_ptr + at, mask=at < end, other=float("-inf"))
            score = x
            if inverse > 0:
                score = tl.where(x >= bound, (x - peak) * inverse + _gumbel(random[j]), float("-inf"))
            better = (score > best) & (at < end)
            best = tl.where(better, score, best)
            token = tl.where(better, at, token)
    most = tl.max(best)
    tl.store(best_ptr + row * splits + split, most)
    tl.store(at_ptr + row * splits + split, tl.min(tl.where(best == most, token, vocab - 1)))


@triton.jit(do_not_specialize=["splits"])
def _pick(best_ptr, at_ptr, tokens_ptr, splits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take the best token of the parts of one row, the lowest of equals."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * splits + i, mask=i < splits, other=float("-inf"))
    at = tl.load(at_ptr + row * splits + i, mask=i < splits, other=2147483647)
    tl.store(tokens_ptr + row, tl.min(tl.where((best == tl.max(best)) & (i < splits), at, 2147483647)))
