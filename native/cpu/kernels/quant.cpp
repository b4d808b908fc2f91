// Groups of elements to codes and back. One group is read twice (range, then codes); the second time from the cache.
#include <ds/quant.h>

#include "declare.h"
#include "staging.h"

namespace {

using ds::QuantFormat;
using ds::QuantSources;
using ds::QuantSpec;

constexpr std::int64_t piece = 512;               // elements staged together: whole bytes at every code width
constexpr float smallest_scale = 1.17549435e-38f;  // so that its inverse is finite

typedef std::int32_t v4i __attribute__((vector_size(16)));
typedef float v4f __attribute__((vector_size(16)));
typedef std::uint8_t vc __attribute__((vector_size(DS_LANES)));

DS_INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
DS_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
DS_INLINE vi int_splat(std::int32_t x) { return x - vi{}; }

// The largest of all lanes; four at a time, because GCC takes vectors apart one element at a time.
template <class V4, class V>
DS_INLINE auto largest(V x) {
  V4 out;
  std::memcpy(&out, &x, 16);
  for (int k = 1; k < lanes / 4; k++) {
    V4 next;
    std::memcpy(&next, reinterpret_cast<const char *>(&x) + 16 * k, 16);
    out = next > out ? next : out;
  }
  const auto a = out[0] > out[1] ? out[0] : out[1], b = out[2] > out[3] ? out[2] : out[3];
  return a > b ? a : b;
}

// Low bytes of each lane, and back. GCC 12 does these one byte at a time when written in its vector language.
DS_INLINE void store_bytes(std::uint8_t *p, vi x) {
#if defined(__AVX512F__) && DS_LANES == 16
  store(p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__) && DS_LANES == 8
  const __m256i bytes = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(255));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  const long long low = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
  std::memcpy(p, &low, 8);
#elif defined(__SSE2__) && DS_LANES == 4
  const __m128i bytes = _mm_and_si128((__m128i)x, _mm_set1_epi32(255)), words = _mm_packs_epi32(bytes, bytes);
  const int low = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
  std::memcpy(p, &low, 4);
#else
  store(p, __builtin_convertvector((vu)x, vc));
#endif
}
DS_INLINE vi load_bytes(const std::uint8_t *p) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vi)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__) && DS_LANES == 8
  return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<long long>(p)));
#elif defined(__SSE2__) && DS_LANES == 4
  const __m128i zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128(load<int>(p));
  return (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero);
#else
  return __builtin_convertvector(load<vc>(p), vi);
#endif
}

// The same, the highest bit of a byte being its sign.
DS_INLINE vi load_signed_bytes(const std::uint8_t *p) {
#if defined(__AVX512F__) && DS_LANES == 16
  return (vi)_mm512_cvtepi8_epi32(load<__m128i>(p));
#elif defined(__AVX2__) && DS_LANES == 8
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<long long>(p)));
#else
  return (load_bytes(p) << 24) >> 24;
#endif
}

struct Extent {  // of one group
  vi magnitude = {};  // bits of the largest |x|: infinities and NaN compare above every number
  vf minus_lo = {}, hi = {};
};

struct Mapping {  // codes = f(x * inverse) of one group
  float inverse;
  std::int32_t zero;
  bool finite;
};

// fp32 elements [i, i + n) of x, the memory itself or a copy in scratch.
DS_INLINE const float *as_f32(const void *x, Dtype d, std::int64_t i, std::int64_t n, float *scratch) {
  if (d == Dtype::f32) return static_cast<const float *>(x) + i;
  widen(scratch, at(x, d, i), d, n);
  return scratch;
}

static void extend(Extent &e, const float *x, std::int64_t n, bool both_ends) {
  Extent t = e;
  auto take = [&](vf v) {
    t.magnitude = larger(t.magnitude, (vi)bits(v) & 0x7fffffff);
    if (both_ends) t.minus_lo = larger(-v, t.minus_lo), t.hi = larger(v, t.hi);
  };
  each_vector(
      n, [&](std::int64_t i) { take(load<vf>(x + i)); },
      [&](std::int64_t i, std::int64_t r) { take(load_part<vf>(x + i, r)); });
  e = t;
}

DS_INLINE float value_of(std::int32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

DS_INLINE float at_least_smallest(float s) { return s < smallest_scale ? smallest_scale : s; }

// Writes the group's parameters; returns how codes are made. A group that is not finite gets the scale NaN, so that it
// comes back as NaN: an overflow is never hidden.
static Mapping map_group(const QuantSpec &s, const Extent &e, float *params) {
  const std::int32_t magnitude = largest<v4i>(e.magnitude);
  if (magnitude >= 0x7f800000) {
    params[0] = value_of(0x7fc00000);
    if (!s.symmetric) params[1] = 0.0f;
    return {0.0f, 0, false};
  }
  if (s.symmetric) {
    params[0] = at_least_smallest(value_of(magnitude) / s.format.maximum);
    return {1.0f / params[0], 0, true};
  }
  const float levels = static_cast<float>((1 << s.format.bits) - 1), minus_lo = largest<v4f>(e.minus_lo);
  params[0] = at_least_smallest(largest<v4f>(e.hi) / levels + minus_lo / levels);
  const float inverse = 1.0f / params[0];
  params[1] = __builtin_rintf(minus_lo * inverse);
  return {inverse, static_cast<std::int32_t>(params[1]), true};
}

// Uniform in (-1/2, 1/2), odd multiples of 2^-25, from the index of an element and two keys: the 32-bit mixing function
// "lowbias32" found by C. Wellons, a key before and a key between its multiplications, so that an element's draw does
// not depend on how the tensor was cut.
alignas(64) const std::uint32_t steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
DS_INLINE vf draw(const QuantSpec &s, std::int64_t index) {
  constexpr std::uint32_t stride = 0x9e3779b9u;  // between the keys of one run of 2^32 elements and the next
  const std::uint32_t first = static_cast<std::uint32_t>(index);
  const std::uint32_t run = s.key[1] + static_cast<std::uint32_t>(static_cast<std::uint64_t>(index) >> 32) * stride;
  const vu lo = first + load<vu>(steps), x = lo ^ s.key[0];
  const vu keyed = (x ^ (x >> 16)) * 0x7feb352du + run + ((vu)(lo < first) & stride);  // lo wrapped: the next run
  const vu mixed = (keyed ^ (keyed >> 15)) * 0x846ca68bu;
  return (__builtin_convertvector((vi)(mixed ^ (mixed >> 16)) >> 8, vf) + 0.5f) * 5.9604644775390625e-8f;
}

// y rounded to an integer, |y| < 2^22: to the nearest one, or up with the probability of its fraction, which is rounding
// y + draw to the nearest. Adding 1.5 * 2^23 leaves the integer in the low bits, rounded to even.
template <bool stochastic>
DS_INLINE vi round_to_int(const QuantSpec &s, vf y, std::int64_t index) {
  if (stochastic) y = y + draw(s, index);
  return (vi)bits(y + 12582912.0f) - 0x4b400000;
}

template <bool stochastic>
DS_INLINE vi integer_code(const QuantSpec &s, const Mapping &m, vf x, std::int64_t index) {
  const std::int32_t top = s.symmetric ? s.format.max_code : (1 << s.format.bits) - 1, low = s.symmetric ? -top : 0;
  const vi q = round_to_int<stochastic>(s, x * m.inverse, index) + m.zero;
  const vi clamped = q > top ? int_splat(top) : q;
  return clamped < low ? int_splat(low) : clamped;
}

// k = |y| in units of the format's spacing at |y|; then codes count up through subnormals, exponents and carries alike.
template <bool stochastic>
DS_INLINE vi float_code(const QuantSpec &s, const Mapping &m, vf x, std::int64_t index) {
  const QuantFormat &f = s.format;
  const vf y = x * m.inverse;
  const vi magnitude = (vi)bits(y) & 0x7fffffff, lowest = int_splat(128 - f.bias);
  const vi exponent = larger(magnitude >> 23, lowest);
  const vf units = (vf)magnitude * (vf)((254 + f.mantissa - exponent) << 23);
  const vi code = round_to_int<stochastic>(s, units, index) + ((exponent - lowest) << f.mantissa);
  const vi kept = code > f.max_code ? int_splat(f.max_code) : code;
  return kept | (vi)((bits(y) >> 31) << (f.bits - 1));
}

template <class Code>
DS_INLINE void each_code(std::uint8_t *codes, const float *x, std::int64_t n, std::int64_t index, Code code) {
  each_vector(
      n, [&](std::int64_t i) { store_bytes(codes + i, code(load<vf>(x + i), index + i)); },
      [&](std::int64_t i, std::int64_t r) {
        std::uint8_t last[lanes];
        store_bytes(last, code(load_part<vf>(x + i, r), index + i));
        std::memcpy(codes + i, last, static_cast<std::size_t>(r));
      });
}

// Codes of one piece, a byte each. The copies live in registers: stores of bytes could change anything behind a pointer.
template <bool stochastic>
static void encode(const QuantSpec &spec, const Mapping &mapping, std::uint8_t *codes, const float *x, std::int64_t n,
                   std::int64_t index) {
  const QuantSpec s = spec;
  const Mapping m = mapping;
  if (s.format.mantissa < 0)
    each_code(codes, x, n, index, [=](vf v, std::int64_t i) { return integer_code<stochastic>(s, m, v, i); });
  else
    each_code(codes, x, n, index, [=](vf v, std::int64_t i) { return float_code<stochastic>(s, m, v, i); });
}

// The vector parts of pack() and unpack(), 16 bytes at a time: how many of the packed bytes are done. Neighbours are joined
// by multiplying and adding; a shuffle then closes the gaps. Scalar code took as long as everything else together.
static std::int64_t pack_vectors(std::uint8_t *out, const std::uint8_t *codes, std::int64_t bytes, int width) {
  std::int64_t o = 0;
#if defined(__SSSE3__)
  const __m128i low = _mm_set1_epi8(15), one_and_16 = _mm_set1_epi16(0x1001);
  const __m128i one_and_64 = _mm_set1_epi16(0x4001), one_and_4096 = _mm_set1_epi32(0x10000001);
  const __m128i close = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  if (width == 4)
    for (; o + 16 <= bytes; o += 16) {
      const __m128i a = _mm_and_si128(load<__m128i>(codes + 2 * o), low);
      const __m128i b = _mm_and_si128(load<__m128i>(codes + 2 * o + 16), low);
      store(out + o, _mm_packus_epi16(_mm_maddubs_epi16(a, one_and_16), _mm_maddubs_epi16(b, one_and_16)));
    }
  else  // writes 16 bytes for 12; the next step, or the scalar rest, writes the last four again
    for (; o + 16 <= bytes; o += 12) {
      const __m128i pairs = _mm_maddubs_epi16(load<__m128i>(codes + o / 3 * 4), one_and_64);
      store(out + o, _mm_shuffle_epi8(_mm_madd_epi16(pairs, one_and_4096), close));
    }
#else
  (void)out, (void)codes, (void)bytes, (void)width;
#endif
  return o;
}

static std::int64_t unpack_vectors(std::uint8_t *codes, const std::uint8_t *in, std::int64_t bytes, int width) {
  std::int64_t o = 0;
#if defined(__SSSE3__)
  const __m128i low = _mm_set1_epi8(15), open = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
  if (width == 4)
    for (; o + 16 <= bytes; o += 16) {
      const __m128i x = load<__m128i>(in + o);
      const __m128i even = _mm_and_si128(x, low), odd = _mm_and_si128(_mm_srli_epi16(x, 4), low);
      store(codes + 2 * o, _mm_unpacklo_epi8(even, odd));
      store(codes + 2 * o + 16, _mm_unpackhi_epi8(even, odd));
    }
  else
    for (; o + 16 <= bytes; o += 12) {
      const __m128i w = _mm_shuffle_epi8(load<__m128i>(in + o), open);
      const __m128i a = _mm_and_si128(w, _mm_set1_epi32(0x3f));
      const __m128i b = _mm_and_si128(_mm_slli_epi32(w, 2), _mm_set1_epi32(0x3f00));
      const __m128i c = _mm_and_si128(_mm_slli_epi32(w, 4), _mm_set1_epi32(0x3f0000));
      const __m128i d = _mm_and_si128(_mm_slli_epi32(w, 6), _mm_set1_epi32(0x3f000000));
      store(codes + o / 3 * 4, _mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d)));
    }
#else
  (void)codes, (void)in, (void)bytes, (void)width;
#endif
  return o;
}

// Bytes to codes of 4 or 6 bits, first element in the lowest bits. `codes` is writable up to a multiple of four.
static void pack(std::uint8_t *__restrict out, std::uint8_t *__restrict codes, std::int64_t n, int width) {
  for (std::int64_t i = n; i % 4 != 0; i++) codes[i] = 0;
  const std::int64_t bytes = (n * width + 7) / 8;
  std::int64_t o = pack_vectors(out, codes, bytes, width);
  if (width == 4) {
    for (; o < bytes; o++) out[o] = static_cast<std::uint8_t>((codes[2 * o] & 15) | (codes[2 * o + 1] << 4));
    return;
  }
  for (; o < bytes; o += 3) {
    std::uint32_t w;
    std::memcpy(&w, codes + o / 3 * 4, 4);
    w = (w & 0x3fu) | (w >> 2 & 0xfc0u) | (w >> 4 & 0x3f000u) | (w >> 6 & 0xfc0000u);
    std::memcpy(out + o, &w, static_cast<std::size_t>(bytes - o < 3 ? bytes - o : 3));
  }
}

static void unpack(std::uint8_t *__restrict codes, const std::uint8_t *__restrict in, std::int64_t n, int width) {
  const std::int64_t bytes = (n * width + 7) / 8;
  std::int64_t o = unpack_vectors(codes, in, bytes, width);
  if (width == 4) {
    for (; o < bytes; o++) {
      codes[2 * o] = in[o] & 15;
      codes[2 * o + 1] = static_cast<std::uint8_t>(in[o] >> 4);
    }
    return;
  }
  for (; o < bytes; o += 3) {
    std::uint32_t w = 0;
    std::memcpy(&w, in + o, static_cast<std::size_t>(bytes - o < 3 ? bytes - o : 3));
    w = (w & 0x3fu) | (w & 0xfc0u) << 2 | (w & 0x3f000u) << 4 | (w & 0xfc0000u) << 6;
    std::memcpy(codes + o / 3 * 4, &w, 4);
  }
}

DS_INLINE vf signed_value(const QuantFormat &f, vi code) {
  const int unused = 32 - f.bits;
  return __builtin_convertvector((code << unused) >> unused, vf);  // sign extension
}

DS_INLINE vf float_value(const QuantFormat &f, vi code) {
  const vi magnitude = code & ((1 << (f.bits - 1)) - 1);
  const vf normal = (vf)((magnitude << (23 - f.mantissa)) + ((127 - f.bias) << 23));
  const vf tiny = __builtin_convertvector(magnitude, vf) * value_of((128 - f.bias - f.mantissa) << 23);
  const vf value = select(magnitude < (1 << f.mantissa), tiny, normal);
  return from_bits(bits(value) | (vu)((code >> (f.bits - 1)) << 31));
}

// Codes of one piece of one group, a byte each, of up to `most` sources, with their parameters.
struct Coded {
  static constexpr int most = 8;
  const std::uint8_t *codes;
  std::int64_t stride;  // bytes from one source's codes to the next one's
  int count;
  float scale[most], zero[most];
};

// Where values go, a vector at a time: fp32 in the cache; and results, multiplied by `factor`, past it.
struct InCache {
  float *out;
  DS_INLINE void put(const InCache &t, std::int64_t i, vf x) { store(t.out + i, x); }
  DS_INLINE void put_part(const InCache &t, std::int64_t i, vf x, std::int64_t r) { store_part(t.out + i, x, r); }
};

struct PastCache {
  float *out;
  float factor;
  DS_INLINE void put(const PastCache &t, std::int64_t i, vf x) { stream(t.out + i, x * t.factor); }
  DS_INLINE void put_part(const PastCache &t, std::int64_t i, vf x, std::int64_t r) {
    store_part(t.out + i, x * t.factor, r);
  }
};

struct HalvesPastCache {
  std::uint16_t *out;
  float factor;
  bool bf16;
  DS_INLINE vh half(const HalvesPastCache &t, vf x) {
    return t.bf16 ? f32_to_bf16(x * t.factor) : f32_to_f16(x * t.factor);
  }
  DS_INLINE void put(const HalvesPastCache &t, std::int64_t i, vf x) { stream(t.out + i, half(t, x)); }
  DS_INLINE void put_part(const HalvesPastCache &t, std::int64_t i, vf x, std::int64_t r) {
    store_part(t.out + i, half(t, x), r);
  }
};

// The sum of the sources' values (and of what `acc` holds), in their order, in a register: values are stored once,
// whatever their number.
template <bool add, bool alone, class Target, class Load, class Value>
DS_INLINE void each_value(const float *acc, const Target &target, const Coded &coded, std::int64_t n, Load bytes,
                          Value value) {
  // Copies that no store can change, field by field: a load of more than one of the fields would cover several stores
  // that are still under way, and wait for every store before them, a piece of results on its way past the cache. That
  // cost up to two thirds of the time, or nothing, depending on where the stack happened to lie.
  const Target to = target;
  const std::uint8_t *const codes = coded.codes;
  const std::int64_t stride = coded.stride;
  const int count = alone ? 1 : coded.count;
  const float scale = coded.scale[0], zero = coded.zero[0];
  auto total = [&](vf sum, auto read) {
    sum = add ? sum + value(read(0), zero) * scale : value(read(0), zero) * scale;
    for (int k = 1; k < count; k++) sum = sum + value(read(k), coded.zero[k]) * coded.scale[k];
    return sum;
  };
  each_vector(
      n,
      [&](std::int64_t i) {
        const vf before = add ? load<vf>(acc + i) : vf{};
        Target::put(to, i, total(before, [&](int k) { return bytes(codes + k * stride + i); }));
      },
      [&](std::int64_t i, std::int64_t r) {
        auto read = [&](int k) {
          std::uint8_t last[lanes] = {};
          std::memcpy(last, codes + k * stride + i, static_cast<std::size_t>(r));
          return bytes(last);
        };
        Target::put_part(to, i, total(add ? load_part<vf>(acc + i, r) : vf{}, read), r);
      });
}

template <bool add, bool alone, class Target>
static void decode(const QuantSpec &spec, const float *acc, const Target &to, const Coded &coded, std::int64_t n) {
  const QuantFormat f = spec.format;
  auto plain = [](const std::uint8_t *p) { return load_bytes(p); };
  auto with_sign = [](const std::uint8_t *p) { return load_signed_bytes(p); };
  if (f.mantissa >= 0)
    each_value<add, alone>(acc, to, coded, n, plain, [=](vi c, float) { return float_value(f, c); });
  else if (!spec.symmetric)
    each_value<add, alone>(acc, to, coded, n, plain,
                           [](vi c, float zero) { return __builtin_convertvector(c, vf) - zero; });
  else if (f.bits == 8)
    each_value<add, alone>(acc, to, coded, n, with_sign, [](vi c, float) { return __builtin_convertvector(c, vf); });
  else
    each_value<add, alone>(acc, to, coded, n, plain, [=](vi c, float) { return signed_value(f, c); });
}

// The first `most` sources of a piece, or what is left of them, decoded to `to`.
template <class Target>
static void decode_first(const QuantSpec &s, const Target &to, const Coded &c, std::int64_t n) {
  if (c.count > 1)
    decode<false, false>(s, nullptr, to, c, n);
  else
    decode<false, true>(s, nullptr, to, c, n);
}

static void scale_block(float *x, std::int64_t n, float factor) {
  each_vector(
      n, [&](std::int64_t i) { store(x + i, load<vf>(x + i) * factor); },
      [&](std::int64_t i, std::int64_t r) { store_part(x + i, load_part<vf>(x + i, r) * factor, r); });
}

struct Piece {  // elements [first, first + n) of group `group` of every source
  std::int64_t group, first, n;
};

constexpr std::int64_t staged_row = piece + 64;

// Up to Coded::most sources from number `done` on; codes narrower than a byte are unpacked into `staged`.
DS_INLINE Coded coded_piece(const QuantSpec &s, const QuantSources &q, const Piece &p, std::int64_t done,
                            std::uint8_t *staged) {
  const int width = s.format.bits;
  const std::int64_t left = q.count - done;
  const unsigned char *row = q.row + done * q.stride;
  const std::uint8_t *codes = row + (p.group * s.group + p.first) * width / 8;
  Coded c = {codes, q.stride, static_cast<int>(left < Coded::most ? left : Coded::most), {}, {}};
  for (int k = 0; k < c.count; k++) {
    const float *params = reinterpret_cast<const float *>(row + k * q.stride + q.params_at) + p.group * ds::quant_params(s);
    c.scale[k] = params[0];
    c.zero[k] = s.symmetric ? 0.0f : params[1];
    if (width != 8) unpack(staged + k * staged_row, codes + k * q.stride, p.n, width);
  }
  if (width != 8) c.codes = staged, c.stride = staged_row;
  return c;
}

// The sum over all sources of one piece, in the cache.
static void sum_piece(const QuantSpec &s, const QuantSources &q, const Piece &p, float *acc) {
  alignas(64) std::uint8_t staged[Coded::most * staged_row];
  decode_first(s, InCache{acc}, coded_piece(s, q, p, 0, staged), p.n);
  for (std::int64_t done = Coded::most; done < q.count; done += Coded::most)
    decode<true, false>(s, acc, InCache{acc}, coded_piece(s, q, p, done, staged), p.n);
}

static void copy_past_cache(float *out, const float *x, std::int64_t n) {
  std::int64_t i = 0;
  for (; i < n && reinterpret_cast<std::intptr_t>(out + i) % (lanes * 4) != 0; i++) out[i] = x[i];
  for (; i + lanes <= n; i += lanes) stream(out + i, load<vf>(x + i));
  for (; i < n; i++) out[i] = x[i];
}

// What a pass that writes past the cache waits for on pages of 4 KiB: the next page of the results is looked up while
// this one is written (its first line is fetched for that, one of 64), and codes, of which a page lasts for four or more
// of those, are fetched before a processor that stops at the end of each page would do it.
DS_INLINE void look_ahead(const QuantSpec &s, const QuantSources &q, const Piece &p, const void *out, std::int64_t nbytes) {
  constexpr std::int64_t codes_ahead = 2048, results_ahead = 2048, page = 4096, line = 64;
  const char *next = static_cast<const char *>(out) + results_ahead;
  if (reinterpret_cast<std::uintptr_t>(next) % page < static_cast<std::uintptr_t>(nbytes)) __builtin_prefetch(next);
  const std::int64_t at = (p.group * s.group + p.first) * s.format.bits / 8, n = p.n * s.format.bits / 8;
  for (std::int64_t k = 0; k < q.count; k++)
    for (std::int64_t i = 0; i < n; i += line) __builtin_prefetch(q.row + k * q.stride + at + i + codes_ahead);
}

// One piece, its results written past the cache: directly where whole vectors of results are aligned.
static void stream_piece(const QuantSpec &s, const QuantSources &q, const Piece &p, float factor, void *out, Dtype dtype) {
  look_ahead(s, q, p, out, p.n * ds::size_of(dtype));
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % static_cast<std::uintptr_t>(lanes * ds::size_of(dtype)) == 0;
  if (aligned && q.count <= Coded::most) {
    alignas(64) std::uint8_t staged[Coded::most * staged_row];
    const Coded c = coded_piece(s, q, p, 0, staged);
    if (dtype == Dtype::f32) return decode_first(s, PastCache{static_cast<float *>(out), factor}, c, p.n);
    return decode_first(s, HalvesPastCache{static_cast<std::uint16_t *>(out), factor, dtype == Dtype::bf16}, c, p.n);
  }
  alignas(64) float wide[piece];
  sum_piece(s, q, p, wide);
  if (factor != 1.0f) scale_block(wide, p.n, factor);
  if (dtype == Dtype::f32) return copy_past_cache(static_cast<float *>(out), wide, p.n);
  narrow_streaming(out, dtype, wide, p.n);
}

// ---- products with quantized rows: a code becomes a number in a register, and meets up to `tokens` rows of x there ----------

// a * b + c where one instruction does that; two roundings where it would take a dozen. So products differ between levels in
// their last bits, unlike everything else here.
DS_INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

struct Rows {  // of activations: row t starts at x + t * stride
  const float *x;
  std::int64_t stride;
};

// Two sums a token, so that a product need not wait for the one before it.
template <int tokens>
struct Dots {
  vf sum[tokens][2];
};

template <int tokens, class Load, class Value>
DS_INLINE void each_dot(Dots<tokens> &dots, const Rows &rows, const Coded &coded, std::int64_t n, Load bytes, Value value) {
  const std::uint8_t *const codes = coded.codes;
  const float scale = coded.scale[0], zero = coded.zero[0];
  const float *const x = rows.x;
  const std::int64_t stride = rows.stride;
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const vf one = value(bytes(codes + i), zero) * scale, two = value(bytes(codes + i + lanes), zero) * scale;
    for (int t = 0; t < tokens; t++) {
      dots.sum[t][0] = multiply_add(one, load<vf>(x + t * stride + i), dots.sum[t][0]);
      dots.sum[t][1] = multiply_add(two, load<vf>(x + t * stride + i + lanes), dots.sum[t][1]);
    }
  }
  for (; i < n; i += lanes) {
    const std::int64_t r = n - i < lanes ? n - i : lanes;
    std::uint8_t last[lanes] = {};
    std::memcpy(last, codes + i, static_cast<std::size_t>(r));
    const vf w = value(bytes(last), zero) * scale;
    for (int t = 0; t < tokens; t++)
      dots.sum[t][0] = multiply_add(w, load_part<vf>(x + t * stride + i, r), dots.sum[t][0]);
  }
}

template <int tokens>
DS_INLINE void dot_piece(const QuantSpec &spec, Dots<tokens> &dots, const Rows &rows, const Coded &coded, std::int64_t n) {
  const QuantFormat f = spec.format;
  auto plain = [](const std::uint8_t *p) { return load_bytes(p); };
  auto with_sign = [](const std::uint8_t *p) { return load_signed_bytes(p); };
  if (f.mantissa >= 0)
    each_dot<tokens>(dots, rows, coded, n, plain, [=](vi c, float) { return float_value(f, c); });
  else if (!spec.symmetric)
    each_dot<tokens>(dots, rows, coded, n, plain, [](vi c, float zero) { return __builtin_convertvector(c, vf) - zero; });
  else if (f.bits == 8)
    each_dot<tokens>(dots, rows, coded, n, with_sign, [](vi c, float) { return __builtin_convertvector(c, vf); });
  else
    each_dot<tokens>(dots, rows, coded, n, plain, [=](vi c, float) { return signed_value(f, c); });
}

template <int tokens>
static void dot_row(const QuantSpec &s, const QuantSources &q, std::int64_t cols, const float *x, float *y,
                    std::int64_t stride) {
  alignas(64) std::uint8_t staged[staged_row];
  Dots<tokens> dots = {};
  for (std::int64_t i = 0; i < cols;) {
    const std::int64_t inside = i % s.group, left = s.group - inside < cols - i ? s.group - inside : cols - i;
    const Piece p = {i / s.group, inside, left < piece ? left : piece};
    dot_piece<tokens>(s, dots, Rows{x + i, cols}, coded_piece(s, q, p, 0, staged), p.n);
    i += p.n;
  }
  for (int t = 0; t < tokens; t++) {
    const vf sum = dots.sum[t][0] + dots.sum[t][1];
    float total = 0.0f;
    for (int l = 0; l < lanes; l++) total += sum[l];
    y[t * stride] = total;
  }
}

}  // namespace

namespace ds::DS_ISA {

void quant_dots(const QuantSpec &s, const QuantSources &q, std::int64_t cols, const float *x, std::int64_t tokens, float *y,
                std::int64_t stride) {
  std::int64_t t = 0;
  for (; t + 8 <= tokens; t += 8) dot_row<8>(s, q, cols, x + t * cols, y + t * stride, stride);
  for (; t + 4 <= tokens; t += 4) dot_row<4>(s, q, cols, x + t * cols, y + t * stride, stride);
  for (; t + 2 <= tokens; t += 2) dot_row<2>(s, q, cols, x + t * cols, y + t * stride, stride);
  for (; t < tokens; t++) dot_row<1>(s, q, cols, x + t * cols, y + t * stride, stride);
}

void quantize_group(const QuantSpec &s, unsigned char *codes, float *params, const void *x, Dtype dtype,
                    std::int64_t n, std::int64_t index) {
  alignas(64) float wide[piece];
  alignas(64) std::uint8_t staged[piece + 4];
  Extent e;
  for (std::int64_t i = 0; i < n; i += piece) {
    const std::int64_t m = n - i < piece ? n - i : piece;
    extend(e, as_f32(x, dtype, i, m, wide), m, !s.symmetric);
  }
  const Mapping mapping = map_group(s, e, params);
  const int width = s.format.bits;
  if (!mapping.finite) {
    std::memset(codes, 0, static_cast<std::size_t>((n * width + 7) / 8));
    return;
  }
  for (std::int64_t i = 0; i < n; i += piece) {
    const std::int64_t m = n - i < piece ? n - i : piece;
    const float *values = n <= piece && dtype != Dtype::f32 ? wide : as_f32(x, dtype, i, m, wide);
    std::uint8_t *out = width == 8 ? codes + i : staged;
    if (s.stochastic)
      encode<true>(s, mapping, out, values, m, index + i);
    else
      encode<false>(s, mapping, out, values, m, index + i);
    if (width != 8) pack(codes + i * width / 8, staged, m, width);
  }
}

void dequantize_groups(const QuantSpec &s, const QuantSources &q, std::int64_t first, float factor, void *out, Dtype dtype,
                       std::int64_t n) {
  alignas(64) float wide[piece];
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t inside = i % s.group, left = s.group - inside < n - i ? s.group - inside : n - i;
    const Piece p = {first + i / s.group, inside, left < piece ? left : piece};
    if (q.streaming) {
      stream_piece(s, q, p, factor, at(out, dtype, i), dtype);
    } else {
      float *acc = dtype == Dtype::f32 ? static_cast<float *>(out) + i : wide;
      sum_piece(s, q, p, acc);
      if (factor != 1.0f) scale_block(acc, p.n, factor);
      stage_out(out, dtype, i, p.n, acc);
    }
    i += p.n;
  }
}

}  // namespace ds::DS_ISA
