// Passes over flat ranges: norms, conversion, fill, triad.
#include "declare.h"
#include "squares.h"

namespace {

constexpr std::int64_t stage = 512;

static void add_squares_bf16(Squares &s, const std::uint16_t *x, std::int64_t n) {
  add_squares(
      s, n, [&](std::int64_t i) { return bf16_to_f32(load<vh_half>(x + i)); },
      [&](std::int64_t i, std::int64_t r) { return bf16_to_f32(load_part<vh_half>(x + i, r)); });
}

// y = scale * x, in place of a copy when the two are the same memory.
static void scaled(float *y, const float *x, std::int64_t n, float scale, bool streaming) {
  std::int64_t i = 0;
  if (streaming && reinterpret_cast<std::intptr_t>(y) % 4 == 0) {
    for (; i < n && reinterpret_cast<std::intptr_t>(y + i) % (lanes * 4) != 0; i++) y[i] = x[i] * scale;
    for (; i + lanes <= n; i += lanes) stream(y + i, load<vf>(x + i) * scale);
  }
  for (; i + lanes <= n; i += lanes) store(y + i, load<vf>(x + i) * scale);
  for (; i < n; i++) y[i] = x[i] * scale;
}

static void convert_block(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, bool streaming) {
  alignas(64) float a[stage], b[stage];
  const float *x = static_cast<const float *>(src);
  if (sd != Dtype::f32) widen(a, src, sd, n), x = a;
  if (dd == Dtype::f32) return scaled(static_cast<float *>(dst), x, n, scale, streaming);
  if (scale != 1.0f) scaled(b, x, n, scale, false), x = b;
  if (streaming) return narrow_streaming(dst, dd, x, n);
  narrow(dst, dd, x, n);
}

}  // namespace

namespace ds::DS_ISA {

Norms measure(const void *x, Dtype dtype, std::int64_t n) {
  Squares s;
  if (dtype == Dtype::f32) add_squares_f32(s, static_cast<const float *>(x), n);
  if (dtype == Dtype::bf16) add_squares_bf16(s, static_cast<const std::uint16_t *>(x), n);
  if (dtype == Dtype::f16) {
    alignas(64) float scratch[stage];
    for (std::int64_t i = 0; i < n; i += stage) {
      const std::int64_t m = n - i < stage ? n - i : stage;
      widen(scratch, at(x, dtype, i), dtype, m);
      add_squares_f32(s, scratch, m);
    }
  }
  return Squares::norms(s);
}

void convert(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, bool streaming) {
  for (std::int64_t i = 0; i < n; i += stage)
    convert_block(at(dst, dd, i), dd, at(src, sd, i), sd, n - i < stage ? n - i : stage, scale, streaming);
  if (streaming) stream_fence();
}

void fill(void *dst, Dtype dtype, std::int64_t n, float value) {
  alignas(64) float block[lanes];
  alignas(64) std::uint16_t half[lanes];
  for (int l = 0; l < lanes; l++) block[l] = value;
  const vf v = load<vf>(block);
  if (dtype == Dtype::f32) {
    float *p = static_cast<float *>(dst);
    each_vector(
        n, [&](std::int64_t i) { store(p + i, v); }, [&](std::int64_t i, std::int64_t r) { store_part(p + i, v, r); });
    return;
  }
  narrow(half, dtype, block, lanes);
  const vh h = load<vh>(half);
  std::uint16_t *p = static_cast<std::uint16_t *>(dst);
  each_vector(
      n, [&](std::int64_t i) { store(p + i, h); }, [&](std::int64_t i, std::int64_t r) { store_part(p + i, h, r); });
}

void triad(float *a, const float *b, const float *c, std::int64_t n, float s, bool streaming) {
  std::int64_t i = 0;
  if (streaming && reinterpret_cast<std::intptr_t>(a) % (lanes * 4) == 0) {
    for (; i + lanes <= n; i += lanes) stream(a + i, load<vf>(b + i) + s * load<vf>(c + i));
    stream_fence();
  }
  for (; i + lanes <= n; i += lanes) store(a + i, load<vf>(b + i) + s * load<vf>(c + i));
  for (; i < n; i++) a[i] = b[i] + s * c[i];
}

}  // namespace ds::DS_ISA
