// Several arrays become their sum, and the pass that makes it also knows how large it is.
#pragma once
#include <ds/types.h>

namespace ds {

// dst[i] = src[0][i] + src[1][i] + ..., in that order, in fp32, rounded once to `dtype` (f32, bf16, f16);
// norms: those of dst, as `measure` has them. Arrays are [n] with n >= 0; a source is dst itself or apart
// from it. partials: [ceil(n / norm_block)]. The same bits on any thread count and instruction set.
// Cost: one read of each source, one write (past the cache from `streaming_sum_bytes` on, where dst is aligned to 64 bytes).
// Source: Thakur et al. 2005, section 4.3, the local half of a reduce-scatter; Higham 1993 for the squares.
Status sum_sources(void *dst, const void *const *src, int count, Dtype dtype, std::int64_t n, Norms *partials,
                   Norms *norms, int threads);

// Results this large are read again only after others of their kind have pushed them out of the cache.
constexpr std::int64_t streaming_sum_bytes = 256 << 10;

}  // namespace ds
