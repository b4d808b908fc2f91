#include <ds/stream.h>
#include <ds/sum.h>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {

Status sum_sources(void *dst, const void *const *src, int count, Dtype dtype, std::int64_t n, Norms *partials,
                   Norms *norms, int threads) {
  if (n < 0 || count < 1 || (n > 0 && (!dst || !partials))) return Status::bad_argument;
  const std::int64_t nbytes = n * size_of(dtype);
  // Written past the cache a line must not be read again in the same pass, so not where a source is dst.
  bool streaming = nbytes >= streaming_sum_bytes && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0;
  for (int k = 0; k < count; k++) {
    if (n > 0 && !src[k]) return Status::bad_argument;
    streaming &= src[k] != dst;
  }
  const Kernels &k = kernels();
  split(n, norm_block, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += norm_block)
      partials[i / norm_block] = k.sum_sources(dst, src, count, dtype, i, end - i < norm_block ? end - i : norm_block, streaming);
  });
  *norms = together(partials, n);
  return Status::ok;
}

}  // namespace ds
