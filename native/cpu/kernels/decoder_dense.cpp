// Products of packed weights with a few rows of inputs: see ds/decoder.h for the packing.
//
// A unit's 32 weights of one input are whole vectors, so there is no sum over lanes, and the same loop serves one row (which
// waits for memory) and twelve (which wait for the multiplier). Sums are fp32, of whole rows or of one group at a time.
#include <ds/decoder.h>

#include "declare.h"
#include "staging.h"

#if defined(__AVX512F__) && DS_LANES == 16
#define DS_DOTS 1  // functions with more instructions than the level has, called where the processor has them
#endif

namespace {

using namespace ds::decoder;

constexpr int vectors = 32 / lanes;

// Accumulators of one sum: enough of them that each is added to less often than its latency.
constexpr int phases_of(int rows) { return rows * vectors >= 8 ? 1 : rows * vectors >= 4 ? 2 : 4; }

// Blocks of 8 inputs: `words` 32-bit words of each lane, and number j of vector v.
struct F32 {
  static constexpr Word words = 8;
  static constexpr float centre = 0.0f;
  DS_INLINE vf number(const std::uint32_t *p, int v, int j) { return (vf)load<vu>(p + j * 32 + v * lanes); }
};
struct Bf16 {
  static constexpr Word words = 4;
  static constexpr float centre = 0.0f;
  DS_INLINE vf number(const std::uint32_t *p, int v, int j) {
    const vu w = load<vu>(p + j / 2 * 32 + v * lanes);
    return (vf)(j % 2 ? w & 0xffff0000u : w << 16);
  }
};
struct Int8 {
  static constexpr Word words = 2;
  static constexpr float centre = 128.0f;  // codes become signed, so that sums stay small
  DS_INLINE vf number(const std::uint32_t *p, int v, int j) {
    const vu w = load<vu>(p + j / 4 * 32 + v * lanes) ^ 0x80808080u;
    return __builtin_convertvector((vi)(w << (24 - 8 * (j % 4))) >> 24, vf);
  }
};
struct Int4 {
  static constexpr Word words = 1;
  static constexpr float centre = 8.0f;
  DS_INLINE vf number(const std::uint32_t *p, int v, int j) {
    const int shift = 8 * (j % 4) + (j >= 4 ? 4 : 0);
    const vu w = load<vu>(p + v * lanes);
#if defined(__AVX512F__) && DS_LANES == 16
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (vf)_mm512_permutexvar_ps((__m512i)(w >> shift), table);  // looks at the lowest four bits only
#else
    return __builtin_convertvector((vi)((w ^ 0x88888888u) << (28 - shift)) >> 28, vf);
#endif
  }
};

// What a call of a product is about.
struct Work {
  const std::uint32_t *w;  // of the unit
  const float *params;     // of the unit
  const char *x;
  Word stride;  // bytes between rows of x
  Word k, group;
};

DS_INLINE const float *row_of(const Work &c, int r) { return reinterpret_cast<const float *>(c.x + r * c.stride); }

template <class Codes, int R, bool Groups>
static void numbers(const Work &c, float *out) {
  constexpr int phases = phases_of(R);
  vf total[R][vectors] = {};
  const Word groups = (c.k + c.group - 1) / c.group;
  for (Word g = 0; g < groups; g++) {
    vf part[phases][R][vectors] = {};
    const Word end = (g + 1) * c.group < c.k ? (g + 1) * c.group : c.k;
    for (Word i = g * c.group; i < end; i += 8) {
      const std::uint32_t *p = c.w + i / 8 * Codes::words * 32;
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        vf n[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) n[v] = Codes::number(p, v, j);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const float x = row_of(c, r)[i + j];
#pragma GCC unroll 8
          for (int v = 0; v < vectors; v++) part[j % phases][r][v] = fma(x, n[v], part[j % phases][r][v]);
        }
      }
    }
    const float *param = c.params + g * 64;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) {
        vf sum = part[0][r][v];
        for (int f = 1; f < phases; f++) sum += part[f][r][v];
        if (Groups) {
          const vf scale = load<vf>(param + v * lanes), zero = load<vf>(param + 32 + v * lanes) - Codes::centre;
          total[r][v] = fma(scale, sum - zero * row_of(c, r)[c.k + g], total[r][v]);
        } else {
          total[r][v] = sum;
        }
      }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < vectors; v++) store(out + r * 32 + v * lanes, total[r][v]);
}

#if defined(DS_DOTS)

// Rows of x: int8 [k], then scales [groups], then sums of codes [groups], fp32.
template <int R, bool Nibbles>
__attribute__((target("avx512vnni"))) static void dots_int8(const Work &c, float *out) {
  constexpr int phases = phases_of(R);
  vf total[R][2] = {};
  const Word groups = (c.k + c.group - 1) / c.group;
  for (Word g = 0; g < groups; g++) {
    __m512i part[phases][R][2] = {};
    const Word end = (g + 1) * c.group < c.k ? (g + 1) * c.group : c.k;
    for (Word i = g * c.group; i < end; i += 8) {
      const std::uint32_t *p = c.w + i / (Nibbles ? 8 : 4) * 32;
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        __m512i w[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          if (Nibbles) {
            const vu both = load<vu>(p + v * 16);
            w[v] = (__m512i)((j ? both >> 4 : both) & 0x0f0f0f0fu);
          } else {
            w[v] = (__m512i)load<vu>(p + j * 32 + v * 16);
          }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const __m512i x = _mm512_set1_epi32(reinterpret_cast<const std::int32_t *>(c.x + r * c.stride)[i / 4 + j]);
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) part[j % phases][r][v] = _mm512_dpbusd_epi32(part[j % phases][r][v], w[v], x);
        }
      }
    }
    const float *param = c.params + g * 64;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const float *row = reinterpret_cast<const float *>(c.x + r * c.stride + c.k);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        vi sum = (vi)part[0][r][v];
        for (int f = 1; f < (phases < 2 ? phases : 2); f++) sum += (vi)part[f][r][v];
        const vf scale = load<vf>(param + v * 16), zero = load<vf>(param + 32 + v * 16);
        total[r][v] = fma(scale * row[g], __builtin_convertvector(sum, vf) - zero * row[groups + g], total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) store(out + r * 32 + v * 16, total[r][v]);
}

#endif

DS_INLINE bool has_dots(Inputs inputs) {
#if defined(DS_DOTS)
  if (inputs == Inputs::int8) return __builtin_cpu_supports("avx512vnni");
#endif
  (void)inputs;
  return false;
}

template <int R>
static void piece(const Matrix &m, bool dots, const Work &c, float *out) {
#if defined(DS_DOTS)
  if (dots && m.kind == Kind::int8) return dots_int8<R, false>(c, out);
  if (dots) return dots_int8<R, true>(c, out);
#endif
  (void)dots;
  if (m.kind == Kind::f32) numbers<F32, R, false>(c, out);
  if (m.kind == Kind::bf16) numbers<Bf16, R, false>(c, out);
  if (m.kind == Kind::int8) numbers<Int8, R, true>(c, out);
  if (m.kind == Kind::int4) numbers<Int4, R, true>(c, out);
}

DS_INLINE Word words_of(Kind kind) { return kind == Kind::f32 ? 8 : kind == Kind::bf16 ? 4 : kind == Kind::int8 ? 2 : 1; }

// One row of `n` numbers becomes codes of groups of m.group: bytes, or (no instruction takes bytes) the numbers they mean.
static void round_row(const Matrix &m, bool dots, const float *x, char *out) {
  const Word groups = (m.k + m.group - 1) / m.group;
  float *floats = reinterpret_cast<float *>(out);
  float *scales = reinterpret_cast<float *>(out + m.k), *sums = dots ? scales + groups : floats + m.k;
  for (Word g = 0; g < groups; g++) {
    const Word begin = g * m.group, end = begin + m.group < m.k ? begin + m.group : m.k;
    float most = 0.0f, sum = 0.0f;
    for (Word i = begin; i < end; i++) {
      const float a = __builtin_fabsf(x[i]);
      most = a > most ? a : most;
    }
    const float scale = most > 0.0f ? most / 127.0f : 1.0f, inverse = 1.0f / scale;
    for (Word i = begin; i < end; i += 8) {  // k and groups are multiples of 8
      for (Word j = i; j < i + 8; j++) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: what is below 1 is rounded off, to even
        const float code = (x[j] * inverse + magic) - magic;
        sum += code;
        if (dots)
          reinterpret_cast<std::int8_t *>(out)[j] = static_cast<std::int8_t>(code);
        else
          floats[j] = code * scale;
      }
    }
    if (dots) scales[g] = scale;
    sums[g] = dots ? sum : sum * scale;
  }
}

}  // namespace

namespace ds::DS_ISA {

std::int64_t dense_stride(const decoder::Matrix &m) {
  const Word groups = (m.k + m.group - 1) / m.group;
  const bool dots = has_dots(m.inputs);
  const Word bytes = dots ? m.k + 8 * groups : 4 * (m.k + groups);
  return (bytes + 63) / 64 * 64 + 64;  // not a power of two: rows of a tile lie in different sets of the cache
}

void dense_row(const decoder::Matrix &m, const float *x, void *out) {
  const bool dots = has_dots(m.inputs);
  char *bytes = static_cast<char *>(out);
  if (m.inputs == Inputs::int8) return round_row(m, dots, x, bytes);
  float *floats = static_cast<float *>(out);
  std::memcpy(floats, x, static_cast<std::size_t>(m.k) * 4);
  if (m.kind == Kind::int8 || m.kind == Kind::int4)
    for (Word g = 0; g * m.group < m.k; g++) {
      float sum = 0.0f;
      for (Word i = g * m.group; i < m.k && i < (g + 1) * m.group; i++) sum += x[i];
      floats[m.k + g] = sum;
    }
}

void dense(const decoder::Matrix &m, std::int64_t unit_index, const void *x, std::int64_t stride, int rows, float *out) {
  const bool dots = has_dots(m.inputs);
  const bool codes = m.kind == Kind::int8 || m.kind == Kind::int4;
  const Word groups = codes ? (m.k + m.group - 1) / m.group : 1;
  Work c = {static_cast<const std::uint32_t *>(m.data) + unit_index * (m.k / 8) * words_of(m.kind) * 32,
            m.params + (codes ? unit_index * groups * 64 : 0),
            static_cast<const char *>(x),
            stride,
            m.k,
            codes ? m.group : m.k};
  int r = 0;
  float *to = out;
  const auto next = [&](int done) {
    c.x += done * stride;
    to += done * 32;
    r += done;
  };
#if DS_LANES == 16
  for (; rows - r >= 12; next(12)) piece<12>(m, dots, c, to);
  for (; rows - r >= 8; next(8)) piece<8>(m, dots, c, to);
  for (; rows - r >= 4; next(4)) piece<4>(m, dots, c, to);
#else
  for (; rows - r >= 3; next(3)) piece<3>(m, dots, c, to);
#endif
  for (; rows - r >= 2; next(2)) piece<2>(m, dots, c, to);
  for (; rows - r >= 1; next(1)) piece<1>(m, dots, c, to);
  if (m.bias)
    for (r = 0; r < rows; r++)
      for (int v = 0; v < vectors; v++) {
        float *at = out + r * 32 + v * lanes;
        store(at, load<vf>(at) + load<vf>(m.bias + unit_index * 32 + v * lanes));
      }
}

}  // namespace ds::DS_ISA
