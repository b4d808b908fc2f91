#include <cstring>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {
Norms together(const Norms *partials, std::int64_t n) {
  Norms all = {0.0, 0.0};
  for (std::int64_t b = 0; b < (n + norm_block - 1) / norm_block; b++) {
    all.squares += partials[b].squares;
    if (all.peak == all.peak && !(partials[b].peak <= all.peak)) all.peak = partials[b].peak;  // NaN, too, which stays
  }
  return all;
}

Status measure(const void *x, Dtype dtype, std::int64_t n, Norms *partials, Norms *out, int threads) {
  if (n < 0 || (n > 0 && (!x || !partials))) return Status::bad_argument;
  const Kernels &k = kernels();
  split(n, norm_block, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += norm_block) {
      const std::int64_t m = end - i < norm_block ? end - i : norm_block;
      partials[i / norm_block] = k.measure(static_cast<const char *>(x) + i * size_of(dtype), dtype, m);
    }
  });
  *out = together(partials, n);
  return Status::ok;
}

Status convert(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, int threads) {
  if (n < 0 || (n > 0 && (!dst || !src))) return Status::bad_argument;
  if (n > 0 && dst == src && size_of(dd) != size_of(sd)) return Status::bad_argument;
  const Kernels &k = kernels();
  const bool streaming = dst != src && n * size_of(dd) >= past_cache_bytes;
  split(n, 4096, threads, [&](std::int64_t begin, std::int64_t end) {
    k.convert(static_cast<char *>(dst) + begin * size_of(dd), dd, static_cast<const char *>(src) + begin * size_of(sd),
              sd, end - begin, scale, streaming);
  });
  return Status::ok;
}

Status fill(void *dst, Dtype dtype, std::int64_t n, float value, int threads) {
  if (n < 0 || (n > 0 && !dst)) return Status::bad_argument;
  const Kernels &k = kernels();
  split(n, 4096, threads, [&](std::int64_t begin, std::int64_t end) {
    k.fill(static_cast<char *>(dst) + begin * size_of(dtype), dtype, end - begin, value);
  });
  return Status::ok;
}

Status copy_ranges(const Move *moves, int count, int threads) {
  for (int i = 0; i < count; i++)
    if (moves[i].nbytes < 0 || (moves[i].nbytes > 0 && (!moves[i].dst || !moves[i].src))) return Status::bad_argument;
  const Kernels &k = kernels();
  for (int i = 0; i < count; i++) {
    const Move &m = moves[i];
    const bool streaming = m.nbytes >= streaming_move_bytes;
    split(m.nbytes, 4096, m.nbytes < streaming_move_bytes ? 1 : threads, [&](std::int64_t begin, std::int64_t end) {
      char *to = static_cast<char *>(m.dst) + begin;
      const char *from = static_cast<const char *>(m.src) + begin;
      if (streaming) k.copy_streaming(to, from, end - begin);
      else std::memcpy(to, from, static_cast<std::size_t>(end - begin));
    });
  }
  return Status::ok;
}

Status triad(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming, int threads) {
  if (n < 0 || (n > 0 && (!a || !b || !c))) return Status::bad_argument;
  const Kernels &k = kernels();
  split(n, 4096, threads, [&](std::int64_t begin, std::int64_t end) {
    k.triad(a + begin, b + begin, c + begin, end - begin, s, streaming);
  });
  return Status::ok;
}

}  // namespace ds
