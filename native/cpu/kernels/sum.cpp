// The sum of several arrays with the norms of the result. A stage stays in the first-level cache between its steps.
#include "declare.h"
#include "squares.h"

namespace {

constexpr std::int64_t stage = 512;

DS_INLINE void add(float *acc, const float *x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i++) acc[i] = acc[i] + x[i];
}

// Both halves of a 16-element step while it is in registers: what a stage costs more than a plain sum would show.
static void sum_two(Squares &s, float *dst, const float *a, const float *b, std::int64_t n, bool streaming) {
  std::int64_t i = 0;
  for (; i + Squares::width <= n; i += Squares::width)
    for (int k = 0; k < Squares::width / lanes; k++) {
      const vf x = load<vf>(a + i + k * lanes) + load<vf>(b + i + k * lanes);
      if (streaming) stream(dst + i + k * lanes, x);
      else store(dst + i + k * lanes, x);
      vf_half half[2];
      std::memcpy(half, &x, sizeof x);
      Squares::add(s, 2 * k, half[0]);
      Squares::add(s, 2 * k + 1, half[1]);
    }
  float rest[Squares::width];
  for (std::int64_t j = i; j < n; j++) dst[j] = rest[j - i] = a[j] + b[j];
  add_squares_f32(s, rest, n - i);
}

static void put(void *dst, Dtype dtype, std::int64_t i, const float *acc, std::int64_t m, bool streaming) {
  if (dtype != Dtype::f32) return streaming ? narrow_streaming(at(dst, dtype, i), dtype, acc, m) : narrow(at(dst, dtype, i), dtype, acc, m);
  float *to = static_cast<float *>(dst) + i;
  std::int64_t j = 0;
  if (streaming)
    for (; j + lanes <= m; j += lanes) stream(to + j, load<vf>(acc + j));
  std::memcpy(to + j, acc + j, static_cast<std::size_t>(m - j) * sizeof(float));
}

}  // namespace

namespace ds::DS_ISA {

Norms sum_sources(void *dst, const void *const *src, int count, Dtype dtype, std::int64_t from, std::int64_t n,
                   bool streaming) {
  Squares s;
  alignas(64) float acc[stage], next[stage];
  if (dtype == Dtype::f32 && count == 2) {
    sum_two(s, static_cast<float *>(dst) + from, static_cast<const float *>(src[0]) + from,
            static_cast<const float *>(src[1]) + from, n, streaming);
    if (streaming) stream_fence();
    return Squares::norms(s);
  }
  for (std::int64_t i = from; i < from + n; i += stage) {
    const std::int64_t m = from + n - i < stage ? from + n - i : stage;
    for (int k = 0; k < count; k++) {
      if (dtype == Dtype::f32 && k > 0) {
        add(acc, static_cast<const float *>(src[k]) + i, m);
        continue;
      }
      float *to = k == 0 ? acc : next;
      if (dtype == Dtype::f32) std::memcpy(to, static_cast<const float *>(src[k]) + i, static_cast<std::size_t>(m) * sizeof(float));
      else widen(to, at(src[k], dtype, i), dtype, m);
      if (k > 0) add(acc, next, m);
    }
    if (dtype != Dtype::f32) {  // the squares are those of what is stored
      alignas(64) std::uint16_t stored[stage];
      narrow(stored, dtype, acc, m);
      widen(next, stored, dtype, m);
      add_squares_f32(s, next, m);
    } else {
      add_squares_f32(s, acc, m);
    }
    put(dst, dtype, i, acc, m, streaming);
  }
  if (streaming) stream_fence();
  return Squares::norms(s);
}

}  // namespace ds::DS_ISA
