// Passes over one flat range: sum of squares, conversion, fill, and the triad that measures the memory's bandwidth.
#pragma once
#include <ds/types.h>

namespace ds {

// Elements whose squares are summed together before partial sums are combined in order.
constexpr std::int64_t norm_block = 16384;

// Sum of squares in fp64, the same on any thread count and instruction set. `partials` holds one double per
// norm_block elements. Cost: one read.
Status sum_squares(const void *x, Dtype dtype, std::int64_t n, double *partials, double *out, int threads);

// dst = cast(scale * src); round to nearest even. dst may be src if the element sizes are equal.
// Cost: one read, one write (streamed past the cache when `n` is large).
Status convert(void *dst, Dtype dst_dtype, const void *src, Dtype src_dtype, std::int64_t n, float scale, int threads);

Status fill(void *dst, Dtype dtype, std::int64_t n, float value, int threads);

// a = b + s * c: the STREAM triad. `streaming` stores past the cache. Cost: 12 bytes an element.
Status triad(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming, int threads);

}  // namespace ds
