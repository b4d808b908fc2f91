// Adding squares of whole arrays to `Squares`: what every pass that ends in a norm shares.
#pragma once
#include "staging.h"

namespace {

// `half(i)` gives the elements [i, i + lanes/2) as fp32; `rest(i, r)` the last r of them, then zeros.
template <class F, class G>
DS_INLINE void add_squares(Squares &s, std::int64_t n, F half, G rest) {
  std::int64_t i = 0;
  for (; i + Squares::width <= n; i += Squares::width)
    for (int k = 0; k < Squares::parts; k++) Squares::add(s, k, half(i + k * Squares::half));
  for (int k = 0; k < Squares::parts && i + k * Squares::half < n; k++) {
    const std::int64_t j = i + k * Squares::half, r = n - j < Squares::half ? n - j : Squares::half;
    Squares::add(s, k, rest(j, r));
  }
}

[[maybe_unused]] static void add_squares_f32(Squares &s, const float *x, std::int64_t n) {
  add_squares(
      s, n, [&](std::int64_t i) { return load<vf_half>(x + i); },
      [&](std::int64_t i, std::int64_t r) { return load_part<vf_half>(x + i, r); });
}

}  // namespace
