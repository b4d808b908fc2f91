// Splits work over OpenMP threads; the only place that says so. Every split is static, so first touch and later
// passes meet on the same core, and no result depends on it.
#pragma once
#include <cstdint>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ds {

struct Range {
  std::int64_t begin, end;
};

// Part `i` of `parts` of [0, n), cut at multiples of `grain`.
inline Range part_of(std::int64_t n, std::int64_t grain, int i, int parts) {
  const std::int64_t units = (n + grain - 1) / grain;
  const std::int64_t lo = units * i / parts * grain, hi = units * (i + 1) / parts * grain;
  return {lo < n ? lo : n, hi < n ? hi : n};
}

// Threads worth starting for `n` elements: a parallel region costs about what 16 Ki elements do.
inline int useful_threads(std::int64_t n, int threads) {
  const std::int64_t most = n / 16384 + 1;
  return threads < 1 ? 1 : static_cast<int>(threads < most ? threads : most);
}

// Calls f(part, parts) once per thread.
template <class F>
void on_threads(int threads, const F &f) {
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  (void)threads;
  f(0, 1);
}

// Results of this size are written past the cache, where a kernel can: nobody reads all of them again from there.
constexpr std::int64_t past_cache_bytes = 8 << 20;

// After writes past the cache, on the thread that made them, before anybody is told that they are there.
inline void end_of_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Calls f(begin, end) for each thread's part of [0, n).
template <class F>
void split(std::int64_t n, std::int64_t grain, int threads, const F &f) {
  on_threads(useful_threads(n, threads), [&](int i, int parts) {
    const Range r = part_of(n, grain, i, parts);
    if (r.begin < r.end) f(r.begin, r.end);
  });
}

}  // namespace ds
