// A vector of DS_LANES floats, in GCC's vector language, and the few operations that language lacks.
//
// Included only by files compiled once per level. Everything is in an anonymous namespace: a shared inline symbol
// compiled for a high level could be picked by the linker for a low one.
#pragma once
#include <ds/types.h>

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define DS_CAT2(a, b) a##b
#define DS_CAT(a, b) DS_CAT2(a, b)
#define DS_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int lanes = DS_LANES;

typedef float vf __attribute__((vector_size(DS_LANES * 4)));
typedef std::uint32_t vu __attribute__((vector_size(DS_LANES * 4)));
typedef std::int32_t vi __attribute__((vector_size(DS_LANES * 4)));
typedef std::uint16_t vh __attribute__((vector_size(DS_LANES * 2)));
typedef std::int16_t vs __attribute__((vector_size(DS_LANES * 2)));
typedef std::int8_t vb __attribute__((vector_size(DS_LANES)));
typedef float vf_half __attribute__((vector_size(DS_LANES * 2)));
typedef std::uint16_t vh_half __attribute__((vector_size(DS_LANES)));
typedef std::uint32_t vu_half __attribute__((vector_size(DS_LANES * 2)));
typedef std::int32_t vi_half __attribute__((vector_size(DS_LANES * 2)));
typedef double vd __attribute__((vector_size(DS_LANES * 4)));  // half as many lanes, one register

template <class V, class T>
DS_INLINE V load(const T *p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
DS_INLINE void store(T *p, V v) {
  std::memcpy(p, &v, sizeof v);
}

DS_INLINE vf splat(float x) { return x - vf{}; }
DS_INLINE vu bits(vf x) { return (vu)x; }
DS_INLINE vf from_bits(vu x) { return (vf)x; }
DS_INLINE vf abs(vf x) { return from_bits(bits(x) & 0x7fffffffu); }
DS_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

DS_INLINE vf sqrt(vf x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__) && DS_LANES == 8
  return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__) && DS_LANES == 4
  return (vf)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__) && DS_LANES == 4
  return (vf)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < lanes; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// a * b + c with one rounding, as torch's vectorised lerp and addcmul do it.
#if defined(__AVX512F__) && DS_LANES == 16
DS_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__FMA__) && DS_LANES == 8
DS_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__) && DS_LANES == 4
DS_INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#elif defined(__SSE2__) && DS_LANES == 4
// Without the instruction: the product of two floats is exact in fp64; the sum is rounded to odd there (its last bit
// records that something was lost), so the final rounding to fp32 is the only one that counts. Boldo and Melquiond 2008.
DS_INLINE __m128d fma_to_odd(__m128d a, __m128d b, __m128d c) {
  const __m128d zero = _mm_setzero_pd(), x = _mm_mul_pd(a, b), s = _mm_add_pd(x, c), t = _mm_sub_pd(s, x);
  const __m128d error = _mm_add_pd(_mm_sub_pd(x, _mm_sub_pd(s, t)), _mm_sub_pd(c, t));
  const __m128i one = _mm_set1_epi64x(1), bits_s = _mm_castpd_si128(s);
  const __m128i even = _mm_sub_epi64(_mm_and_si128(bits_s, one), one);  // all ones where the last bit is 0
  const __m128i inexact = _mm_castpd_si128(_mm_and_pd(_mm_cmpneq_pd(error, zero), _mm_cmpeq_pd(error, error)));
  const __m128d toward = _mm_xor_pd(_mm_cmplt_pd(error, zero), _mm_cmplt_pd(s, zero));  // the exact sum is smaller
  const __m128i step = _mm_or_si128(_mm_castpd_si128(toward), one);                       // -1 or +1
  return _mm_castsi128_pd(_mm_add_epi64(bits_s, _mm_and_si128(_mm_and_si128(inexact, even), step)));
}
DS_INLINE vf fma(vf a, vf b, vf c) {
  const __m128 x = (__m128)a, y = (__m128)b, z = (__m128)c;
  const __m128d lo = fma_to_odd(_mm_cvtps_pd(x), _mm_cvtps_pd(y), _mm_cvtps_pd(z));
  const __m128d hi = fma_to_odd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y)),
                                _mm_cvtps_pd(_mm_movehl_ps(z, z)));
  return (vf)_mm_movelh_ps(_mm_cvtpd_ps(lo), _mm_cvtpd_ps(hi));
}
#else
DS_INLINE vf fma(vf a, vf b, vf c) {
  for (int i = 0; i < lanes; i++) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
#endif
DS_INLINE vf fma(float a, vf b, vf c) { return fma(splat(a), b, c); }

// x / d, correctly rounded, for one d used many times: `inverse` is 1/d rounded. Markstein 1990: one correction step
// by FMA reaches the rounded quotient, and costs a fifth of a division. Needs |x| > 2^-100 or x = 0.
DS_INLINE vf divide_by(vf x, float d, float inverse) {
#if defined(__FMA__) || defined(__aarch64__)
  const vf q = x * inverse, r = fma(inverse, fma(-d, q, x), q);
  return select((vi)(r == r), r, q);  // infinity has no remainder
#else
  (void)inverse;
  return x / d;
#endif
}

// GCC 12 splits these two conversions into pieces when written in its vector language.
DS_INLINE vd widen(vf_half x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vd)_mm512_cvtps_pd((__m256)x);
#elif defined(__AVX__) && DS_LANES == 8
  return (vd)_mm256_cvtps_pd((__m128)x);
#else
  return __builtin_convertvector(x, vd);
#endif
}
DS_INLINE vf_half bf16_to_f32(vh_half x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vf_half)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#elif defined(__AVX2__) && DS_LANES == 8
  return (vf_half)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_cvtsi64_si128((long long)x)), 16);
#else
  return (vf_half)(__builtin_convertvector(x, vu_half) << 16);
#endif
}

// Sums of squares in 16 fp64 lanes whatever the vector width, added up in lane order: the same bits on every level. The
// square of an fp32 is exact in fp64. Where nobody asks for the peak, the compiler leaves it out.
struct Squares {
  static constexpr int width = 16, half = DS_LANES / 2, parts = width / half;
  vd lane[parts] = {};
  vi_half peak = {};  // magnitudes are ordered as their bits are, and NaN is above infinity
  // `x` holds the elements of lanes [part * half, (part + 1) * half).
  DS_INLINE void add(Squares &s, int part, vf_half x) {
    const vd d = widen(x);
    const vi_half magnitude = (vi_half)x & 0x7fffffff;
    s.peak = magnitude > s.peak ? magnitude : s.peak;
    // The product is exact, so one rounding (FMA) and two give the same bits.
#if defined(__AVX512F__) && DS_LANES == 16
    s.lane[part] = (vd)_mm512_fmadd_pd((__m512d)d, (__m512d)d, (__m512d)s.lane[part]);
#elif defined(__FMA__) && DS_LANES == 8
    s.lane[part] = (vd)_mm256_fmadd_pd((__m256d)d, (__m256d)d, (__m256d)s.lane[part]);
#else
    s.lane[part] += d * d;
#endif
  }
  DS_INLINE double total(const Squares &s) {
    double sum = 0.0;
    for (int k = 0; k < parts; k++)
      for (int l = 0; l < half; l++) sum += s.lane[k][l];
    return sum;
  }
  DS_INLINE ds::Norms norms(const Squares &s) {
    std::int32_t most = 0;
    for (int l = 0; l < half; l++) most = s.peak[l] > most ? s.peak[l] : most;
    float peak;
    std::memcpy(&peak, &most, sizeof peak);
    return {total(s), peak};
  }
};

// Writes past the cache; `p` must be aligned to the vector. Pair with stream_fence().
DS_INLINE void stream(float *p, vf v) {
#if defined(__AVX512F__) && DS_LANES == 16
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__) && DS_LANES == 8
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__) && DS_LANES == 4
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

DS_INLINE void stream(std::uint16_t *p, vh v) {
#if defined(__AVX512F__) && DS_LANES == 16
  _mm256_stream_si256((__m256i *)p, (__m256i)v);
#elif defined(__AVX__) && DS_LANES == 8
  _mm_stream_si128((__m128i *)p, (__m128i)v);
#else
  store(p, v);
#endif
}

DS_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// bfloat16. Integer arithmetic on purpose: the AVX512_BF16 instruction flushes subnormals, so its results would
// differ from the other levels and from torch. Quiet NaN stays NaN.
DS_INLINE vf bf16_to_f32(vh x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);  // GCC 12 takes it apart when written as below
#else
  return from_bits(__builtin_convertvector(x, vu) << 16);
#endif
}
DS_INLINE vh f32_to_bf16(vf x) {
  vu u = bits(x);
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vi nan = (vi)((u & 0x7fffffffu) > 0x7f800000u);
  vu r = ((vu)nan & ((u >> 16) | 0x40u)) | (~(vu)nan & rounded);
  return __builtin_convertvector(r, vh);
}

// IEEE half, with the hardware's conversion where the level has it, else by the float adder (exact for every value).
DS_INLINE vf f16_to_f32(vh x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__) && DS_LANES == 8
  return (vf)_mm256_cvtph_ps((__m128i)x);
#else
  vu w = __builtin_convertvector(x, vu);
  vu sign = (w & 0x8000u) << 16, rest = (w & 0x7fffu) << 13;
  // 2^112 rebiases the exponent: subnormal halves become normal floats in the multiplication.
  vf value = from_bits(rest) * from_bits(vu{} + 0x77800000u);
  vi special = (vi)(rest >= (0x7c00u << 13));
  vu out = ((vu)special & (rest | 0x7f800000u)) | (~(vu)special & bits(value));
  return from_bits(out | sign);
#endif
}
DS_INLINE vh f32_to_f16(vf x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__) && DS_LANES == 8
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vu u = bits(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  // Subnormal halves: adding 0.5 aligns the ulp of the sum with the half's, so the adder does the rounding.
  vu small = bits(from_bits(mag) + 0.5f) - 0x3f000000u;
  vu normal = (mag + 0xc8000fffu + ((mag >> 13) & 1u)) >> 13;
  vi is_small = (vi)(mag < 0x38800000u), is_big = (vi)(mag >= 0x477ff000u), is_nan = (vi)(mag > 0x7f800000u);
  vu r = ((vu)is_small & small) | (~(vu)is_small & normal);
  r = ((vu)is_big & (0x7c00u | ((vu)is_nan & (0x200u | ((mag >> 13) & 0x3ffu))))) | (~(vu)is_big & r);
  return __builtin_convertvector(r | sign, vh);
#endif
}

}  // namespace
