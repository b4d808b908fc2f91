// Products of packed weights with panels of inputs: see ds/decoder.h for the packing of weights, panel.h for that of inputs.
//
// A unit's 32 weights of one input (or pair, or four) are whole vectors, so there is no sum over lanes, and the same loop serves
// one row (which waits for memory) and twelve (which wait for the multiplier: 24 sums in registers share each vector of weights).
// Sums are fp32, of whole rows or of one group at a time.
#include "declare.h"
#include "panel.h"

namespace {

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
  const std::uint32_t *x;  // of the first row
  Word tall, k, group;
  const float *bias;  // of the unit; null: none
  Ahead ahead;
};

// Few rows read weights faster than the processor foresees across pages: they are asked for so many bytes before. More rows ask for what
// the caller wants. i: of eight inputs, `lines` lines of weights.
constexpr Word foreseen = 4096;
template <int R>
DS_INLINE void ask(const Work &c, Word i, const std::uint32_t *p, int lines) {
  if (R <= 4)
    for (int l = 0; l < lines; l++) __builtin_prefetch(reinterpret_cast<const char *>(p) + foreseen + 64 * l);
  else
    for (int l = 0; l < c.ahead.lines; l++) __builtin_prefetch(c.ahead.from + (i / 8 * c.ahead.lines + l) * 64, 0, 2);
}

DS_INLINE void finish(const Work &c, float *out, int v, vf sum) {
  store(out + v * lanes, c.bias ? sum + load<vf>(c.bias + v * lanes) : sum);
}

template <class Codes, int R, bool Groups>
static void numbers(const Work &c, float *out) {
  constexpr int phases = phases_of(R);
  vf total[R][vectors] = {};
  const float *x = reinterpret_cast<const float *>(c.x), *sums = x + c.k * c.tall;
  const Word groups = (c.k + c.group - 1) / c.group;
  for (Word g = 0; g < groups; g++) {
    vf part[phases][R][vectors] = {};
    const Word end = (g + 1) * c.group < c.k ? (g + 1) * c.group : c.k;
    for (Word i = g * c.group; i < end; i += 8) {
      const std::uint32_t *p = c.w + i / 8 * Codes::words * 32;
      ask<R>(c, i, p, 2 * Codes::words);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        vf n[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) n[v] = Codes::number(p, v, j);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const float input = x[(i + j) * c.tall + r];
#pragma GCC unroll 8
          for (int v = 0; v < vectors; v++) part[j % phases][r][v] = fma(input, n[v], part[j % phases][r][v]);
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
          total[r][v] = fma(scale, sum - zero * sums[g * c.tall + r], total[r][v]);
        } else {
          total[r][v] = sum;
        }
      }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < vectors; v++) finish(c, out + r * 32, v, total[r][v]);
}

#if defined(DS_DOTS)

template <int R>
__attribute__((target("avx512bf16"))) static void dots_bf16(const Work &c, float *out) {
  constexpr int phases = phases_of(R);
  __m512 part[phases][R][2] = {};
  for (Word i = 0; i < c.k / 2; i += 4) {  // k is a multiple of 8
    const std::uint32_t *p = c.w + i * 32, *x = c.x + i * c.tall;
    ask<R>(c, 2 * i, p, 8);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const std::uint32_t *row = x + j * c.tall;
      const __m512bh w[2] = {(__m512bh)load<vu>(p + j * 32), (__m512bh)load<vu>(p + j * 32 + 16)};
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<std::int32_t>(row[r]));
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) part[j % phases][r][v] = _mm512_dpbf16_ps(part[j % phases][r][v], w[v], pair);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) {
      vf sum = (vf)part[0][r][v];
      for (int f = 1; f < phases; f++) sum += (vf)part[f][r][v];
      finish(c, out + r * 32, v, sum);
    }
}

template <int R, bool Nibbles>
__attribute__((target("avx512vnni"))) static void dots_int8(const Work &c, float *out) {
  constexpr int phases = phases_of(R) < 2 ? phases_of(R) : 2;
  const Word groups = (c.k + c.group - 1) / c.group;
  const float *scales = reinterpret_cast<const float *>(c.x + c.k / 4 * c.tall), *sums = scales + groups * c.tall;
  for (Word g = 0; g < groups; g++) {
    __m512i part[phases][R][2] = {};
    const Word end = (g + 1) * c.group < c.k ? (g + 1) * c.group : c.k;
    for (Word i = g * c.group; i < end; i += 8) {
      const std::uint32_t *p = c.w + i / (Nibbles ? 8 : 4) * 32, *x = c.x + i / 4 * c.tall;
      ask<R>(c, i, p, Nibbles ? 2 : 4);
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const std::uint32_t *row = x + j * c.tall;
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
          const __m512i four = _mm512_set1_epi32(static_cast<std::int32_t>(row[r]));
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) part[j % phases][r][v] = _mm512_dpbusd_epi32(part[j % phases][r][v], w[v], four);
        }
      }
    }
    // Sums go through memory: written with anything else between, twelve rows' would not stay in registers in the loop above.
    std::int32_t sum[R][32];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) {
        vi all = (vi)part[0][r][v];
        for (int f = 1; f < phases; f++) all += (vi)part[f][r][v];
        store(sum[r] + v * 16, all);
      }
    for (int v = 0; v < 2; v++) {
      const vf scale = load<vf>(c.params + g * 64 + v * 16), zero = load<vf>(c.params + g * 64 + 32 + v * 16);
      const vf bias = g == 0 && c.bias ? load<vf>(c.bias + v * 16) : vf{};
#pragma GCC unroll 1
      for (int r = 0; r < R; r++) {
        const vf number = __builtin_convertvector(load<vi>(sum[r] + v * 16), vf);
        const vf centred = fma(-sums[g * c.tall + r], zero, number);
        float *to = out + r * 32 + v * 16;
        store(to, fma(scale * scales[g * c.tall + r], centred, g == 0 ? bias : load<vf>(to)));
      }
    }
  }
}

#endif

template <int R>
static void piece(const Matrix &m, bool dots, const Work &c, float *out) {
#if defined(DS_DOTS)
  if (dots && m.kind == Kind::bf16) return dots_bf16<R>(c, out);
  if (dots && m.kind == Kind::int8) return dots_int8<R, false>(c, out);
  if (dots) return dots_int8<R, true>(c, out);
#endif
  (void)dots;
  if (m.kind == Kind::f32) numbers<F32, R, false>(c, out);
  if (m.kind == Kind::bf16) numbers<Bf16, R, false>(c, out);
  if (m.kind == Kind::int8) numbers<Int8, R, true>(c, out);
  if (m.kind == Kind::int4) numbers<Int4, R, true>(c, out);
}

DS_INLINE Word unit_words(const Matrix &m) {
  return m.k / 8 * 32 * (m.kind == Kind::f32 ? 8 : m.kind == Kind::bf16 ? 4 : m.kind == Kind::int8 ? 2 : 1);
}

}  // namespace

namespace ds::DS_ISA {

void dense(const decoder::Matrix &m, std::int64_t unit_index, const void *panel, std::int64_t tall, int rows, float *out,
           const decoder::Ahead &ahead) {
  const bool dots = has_dots(m);
  Work c = {static_cast<const std::uint32_t *>(m.data) + unit_index * unit_words(m),
            m.params + unit_index * groups_of(m) * 64,
            static_cast<const std::uint32_t *>(panel),
            tall,
            m.k,
            of_codes(m) ? m.group : m.k,
            m.bias ? m.bias + unit_index * 32 : nullptr,
            ahead};
#if DS_LANES == 16
  // What is computed beyond `rows` is a row that the panel has place for: out has place for a whole panel.
  switch (tall < panel_rows ? 0 : rows) {
    case 5:
    case 6: return piece<6>(m, dots, c, out);
    case 7:
    case 8: return piece<8>(m, dots, c, out);
    case 9:
    case 10: return piece<10>(m, dots, c, out);
    case 11:
    case 12: return piece<12>(m, dots, c, out);
    default: break;
  }
#endif
  while (rows > 0) {
#if DS_LANES == 16
    const int now = rows < 4 ? rows : 4;
#else
    const int now = rows < 3 ? rows : 3;
#endif
    if (now == 1) piece<1>(m, dots, c, out);
    if (now == 2) piece<2>(m, dots, c, out);
    if (now == 3) piece<3>(m, dots, c, out);
#if DS_LANES == 16
    if (now == 4) piece<4>(m, dots, c, out);
#endif
    c.x += now, out += now * 32, rows -= now;
  }
}

}  // namespace ds::DS_ISA
