// Passes over one flat range: norms, conversion, fill, and the triad that measures the memory's bandwidth.
//
// Every array is contiguous, [n] with n >= 0, at a multiple of its element size; f32, bf16 or f16.
#pragma once
#include <ds/types.h>

namespace ds {

// Elements whose squares are summed together before partial sums are combined in order.
constexpr std::int64_t norm_block = 16384;

// out = sum of x[i]^2 in fp64 and max |x[i]|, the same bits on any thread count and instruction set: the square of an fp32 is
// exact in fp64, 16 fp64 lanes are summed within a block of norm_block elements, blocks in order. `partials`: [ceil(n / norm_block)].
// Cost: one read (4 or 2 bytes an element). Source: pairwise summation in blocks, Higham 1993.
Status measure(const void *x, Dtype dtype, std::int64_t n, Norms *partials, Norms *out, int threads);

// The norms of an array from those of its blocks.
Norms together(const Norms *partials, std::int64_t n);

// dst[i] = cast(scale * src[i]), the product in fp32, rounded to nearest even; NaN stays NaN. dst may be src if the element
// sizes are equal; otherwise they do not overlap. Cost: one read, one write: 8 bytes an element for fp32 to fp32, 6 to 16
// bit (written past the cache from 8 MiB on). Source: IEEE 754; bf16 is the upper half of fp32.
Status convert(void *dst, Dtype dst_dtype, const void *src, Dtype src_dtype, std::int64_t n, float scale, int threads);

// dst[i] = cast(value). dst [n] f32, bf16 or f16. Cost: one write, 4 or 2 bytes an element. Source: IEEE 754.
Status fill(void *dst, Dtype dtype, std::int64_t n, float value, int threads);

// Bytes [src, src + nbytes) come to dst.
struct Move {
  void *dst;
  const void *src;
  std::int64_t nbytes;
};

// Each of `count` moves, of any element type and [n] with n >= 0; no dst overlaps anything else of the call. Cost: one read, one write (past the cache from
// `streaming_move_bytes` on). Source: the read of a line that a plain store costs first, McCalpin 1995.
Status copy_ranges(const Move *moves, int count, int threads);

// As large as this, what is copied is next read by another core.
constexpr std::int64_t streaming_move_bytes = 256 << 10;

// a[i] = b[i] + s * c[i], all f32. `streaming` stores past the cache. Cost: 12 bytes an element (16 of traffic without
// `streaming`: the line of `a` is read first). Source: STREAM, McCalpin 1995.
Status triad(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming, int threads);

}  // namespace ds
