// Blocks of fp32 around kernels that compute in fp32 and store in anything: rules exist once, not once per type.
#pragma once
#include "simd.h"

namespace {

using ds::Dtype;

// Calls f(i) for every whole vector of [0, n) and f_tail(i, rest) for what remains.
template <class F, class G>
DS_INLINE void each_vector(std::int64_t n, F f, G f_tail) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i);
  if (i < n) f_tail(i, n - i);
}

// A vector of which only `rest` lanes exist in memory; the others are zero.
template <class V, class T>
DS_INLINE V load_part(const T *p, std::int64_t rest) {
  V v = {};
  std::memcpy(&v, p, static_cast<std::size_t>(rest) * sizeof(T));
  return v;
}

template <class V, class T>
DS_INLINE void store_part(T *p, V v, std::int64_t rest) {
  std::memcpy(p, &v, static_cast<std::size_t>(rest) * sizeof(T));
}

DS_INLINE void *at(void *base, Dtype d, std::int64_t i) {
  return static_cast<char *>(base) + i * ds::size_of(d);
}
DS_INLINE const void *at(const void *base, Dtype d, std::int64_t i) {
  return static_cast<const char *>(base) + i * ds::size_of(d);
}

[[maybe_unused]] static void widen(float *dst, const void *src, Dtype d, std::int64_t n) {
  const std::uint16_t *s = static_cast<const std::uint16_t *>(src);
  if (d == Dtype::bf16)
    each_vector(
        n, [&](std::int64_t i) { store(dst + i, bf16_to_f32(load<vh>(s + i))); },
        [&](std::int64_t i, std::int64_t r) { store_part(dst + i, bf16_to_f32(load_part<vh>(s + i, r)), r); });
  else
    each_vector(
        n, [&](std::int64_t i) { store(dst + i, f16_to_f32(load<vh>(s + i))); },
        [&](std::int64_t i, std::int64_t r) { store_part(dst + i, f16_to_f32(load_part<vh>(s + i, r)), r); });
}

[[maybe_unused]] static void narrow(void *dst, Dtype d, const float *src, std::int64_t n) {
  std::uint16_t *t = static_cast<std::uint16_t *>(dst);
  if (d == Dtype::bf16)
    each_vector(
        n, [&](std::int64_t i) { store(t + i, f32_to_bf16(load<vf>(src + i))); },
        [&](std::int64_t i, std::int64_t r) { store_part(t + i, f32_to_bf16(load_part<vf>(src + i, r)), r); });
  else
    each_vector(
        n, [&](std::int64_t i) { store(t + i, f32_to_f16(load<vf>(src + i))); },
        [&](std::int64_t i, std::int64_t r) { store_part(t + i, f32_to_f16(load_part<vf>(src + i, r)), r); });
}

// The same, written past the cache where the destination allows it (aligned whole vectors).
[[maybe_unused]] static void narrow_streaming(void *dst, Dtype d, const float *src, std::int64_t n) {
  std::uint16_t *t = static_cast<std::uint16_t *>(dst);
  std::int64_t head = (-reinterpret_cast<std::intptr_t>(t) / 2) & (lanes - 1);
  if (reinterpret_cast<std::intptr_t>(t) % 2 != 0 || head >= n) return narrow(dst, d, src, n);
  narrow(t, d, src, head);
  t += head, src += head, n -= head;
  std::int64_t i = 0;
  if (d == Dtype::bf16)
    for (; i + lanes <= n; i += lanes) stream(t + i, f32_to_bf16(load<vf>(src + i)));
  else
    for (; i + lanes <= n; i += lanes) stream(t + i, f32_to_f16(load<vf>(src + i)));
  narrow(t + i, d, src + i, n - i);
}

// fp32 view of elements [i, i+n): the memory itself, or a copy in `scratch`.
DS_INLINE float *stage_in(void *base, Dtype d, std::int64_t i, std::int64_t n, float *scratch) {
  void *p = at(base, d, i);
  if (d == Dtype::f32) return static_cast<float *>(p);
  widen(scratch, p, d, n);
  return scratch;
}

// Writes a staged block back; nothing to do if it was the memory itself.
DS_INLINE void stage_out(void *base, Dtype d, std::int64_t i, std::int64_t n, const float *block) {
  if (d != Dtype::f32) narrow(at(base, d, i), d, block, n);
}

}  // namespace
