// Numbers to codes in groups, and back; the formats are those of ds_ops/formats.py, the bits those of cpu/kernels/quant.cpp.
//
// `quantize` and `dense` take whole pieces at aligned addresses, for a format that is known when they are compiled: a lane's 16 codes are
// one piece of a group whose numbers stay in registers, 8 codes (16 of 6 bits) are one piece of dense output. `any_quantize` and
// `any_dense` take the rest: odd groups, tails, unaligned rows.
#include "device.h"

namespace ds::cuda {

constexpr int quant_threads = 256;
constexpr float smallest_scale = 1.17549435e-38f;  // so that its inverse is finite
constexpr float whole = 12582912.0f;               // x + whole has the nearest integer to x, halves to even, in its lowest bits

// What a format is made of, known when a kernel is compiled: asking at every element took longer than the element.
enum class Kind { symmetric = 0, asymmetric = 1, floating = 2 };

// Rows of codes: row r begins at base + r * row_bytes, its parameters (fp32, one or two a group) at params_at.
struct Rows {
  unsigned char *base;
  std::int64_t rows, cols, params_at, row_bytes, group;
};
struct Code {  // of a format that is known at run time
  std::int32_t bits, mantissa, bias, max_code;
  float maximum;
  std::int32_t draws;
  std::uint32_t key[2];
  std::int64_t offset;
};

// out [rows, cols] = factor * the sum over `sources` of row k * rows + index[r] (null: r).
struct DenseCall {
  Rows from;
  const std::int64_t *index;
  void *out;
  std::int64_t rows, sources, pieces;  // pieces: of all rows
  float factor;
  std::int32_t dtype, group_shift;
  Divisor per_row;  // pieces a row
  Code code;
};
struct QuantizeCall {
  Rows to;
  const std::int64_t *order;
  const void *x;    // dense, or the sum that `from` describes
  std::int64_t groups;  // of all rows
  std::int32_t dtype;
  Divisor per_row;  // groups a row
  Code code;
  Rows from;
  Code from_code;
  std::int64_t sources;
  float factor;
};

// ---- one code ---------------------------------------------------------------------------------------------------------

struct Mapping {  // codes = f(x * inverse) of one group
  float inverse;
  int zero;
  bool finite;
};

DS_FN float draw(const Code &c, std::int64_t index) {
  const std::uint32_t hi = static_cast<std::uint32_t>(static_cast<std::uint64_t>(index) >> 32);
  std::uint32_t x = static_cast<std::uint32_t>(index) ^ c.key[0];
  x = (x ^ (x >> 16)) * 0x7feb352du + c.key[1] + hi * 0x9e3779b9u;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return (static_cast<float>(static_cast<std::int32_t>(x ^ (x >> 16)) >> 8) + 0.5f) * 5.9604644775390625e-8f;
}
DS_FN int round_to_int(const Code &c, float y, std::int64_t index) {
  return static_cast<int>(rintf(c.draws ? y + draw(c, index) : y));
}

template <Kind K>
DS_FN std::uint32_t encode(const Code &f, const Mapping &m, float x, std::int64_t index) {
  if (!m.finite) return 0;
  const float y = x * m.inverse;
  if (K != Kind::floating) {
    const int top = K == Kind::symmetric ? f.max_code : (1 << f.bits) - 1, low = K == Kind::symmetric ? -top : 0;
    int q = round_to_int(f, y, index) + m.zero;
    q = q > top ? top : q < low ? low : q;
    return static_cast<std::uint32_t>(q) & ((1u << f.bits) - 1u);
  }
  const int magnitude = static_cast<int>(to_bits(y) & 0x7fffffffu), lowest = 128 - f.bias;
  const int exponent = (magnitude >> 23) > lowest ? magnitude >> 23 : lowest;
  const float units = from_bits(static_cast<std::uint32_t>(magnitude)) *
                      from_bits(static_cast<std::uint32_t>(254 + f.mantissa - exponent) << 23);
  const int code = round_to_int(f, units, index) + ((exponent - lowest) << f.mantissa);
  return static_cast<std::uint32_t>(code > f.max_code ? f.max_code : code) | (to_bits(y) >> 31) << (f.bits - 1);
}

template <Kind K>
DS_FN float decode(const Code &f, std::uint32_t code, float zero) {
  const int c = static_cast<int>(code);
  if (K != Kind::floating) {
    if (K == Kind::asymmetric) return static_cast<float>(c) - zero;
    return static_cast<float>(c >= 1 << (f.bits - 1) ? c - (1 << f.bits) : c);
  }
  const int magnitude = c & ((1 << (f.bits - 1)) - 1);
  const float normal = from_bits(static_cast<std::uint32_t>((magnitude << (23 - f.mantissa)) + ((127 - f.bias) << 23)));
  const float tiny = static_cast<float>(magnitude) * from_bits(static_cast<std::uint32_t>(128 - f.bias - f.mantissa) << 23);
  const float value = magnitude < 1 << f.mantissa ? tiny : normal;
  return from_bits(to_bits(value) | static_cast<std::uint32_t>(c >> (f.bits - 1)) << 31);
}

// What a lane knows of its numbers: the bits of the largest magnitude (infinities and NaN compare above every number), and where there
// are zero points the largest -x and the largest x, at least 0.
struct Extent {
  int magnitude;
  float minus_lo, hi;
};
template <Dtype D, bool Zero, int Count>
DS_FN Extent extent_of(const Words *x) {
  Extent e = {0, 0.0f, 0.0f};
#if defined(__CUDACC__)
#if __CUDA_ARCH__ >= 900
  if constexpr (D != Dtype::f32 && !Zero) {  // magnitudes of 16 bits compare as integers, two at a time
    std::uint32_t most = 0;
    DS_UNROLL
    for (int j = 0; j < Count; j++) {
      DS_UNROLL
      for (int k = 0; k < 4; k++) asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(x[j].w[k] & 0x7fff7fffu));
    }
    const int low = static_cast<int>(to_bits(low_of<D>(most))), high = static_cast<int>(to_bits(high_of<D>(most)));
    e.magnitude = low > high ? low : high;
    return e;
  }
#endif
#if __CUDA_ARCH__ >= 800
  if constexpr (D != Dtype::f32 && Zero) {  // a NaN stays one, and has the magnitude of one
    std::uint32_t least = 0, most = 0;
    DS_UNROLL
    for (int j = 0; j < Count; j++) {
      DS_UNROLL
      for (int k = 0; k < 4; k++) {
        if constexpr (D == Dtype::bf16) {
          asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(x[j].w[k]));
          asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(x[j].w[k]));
        } else {
          asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(x[j].w[k]));
          asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(x[j].w[k]));
        }
      }
    }
    e.hi = fmaxf(low_of<D>(most), high_of<D>(most));
    e.minus_lo = 0.0f - fminf(low_of<D>(least), high_of<D>(least));
    const std::uint32_t a = most & 0x7fffu, b = most >> 16 & 0x7fffu, c = least & 0x7fffu, d = least >> 16 & 0x7fffu;
    const std::uint32_t ab = a > b ? a : b, cd = c > d ? c : d;
    e.magnitude = static_cast<int>(to_bits(low_of<D>(ab > cd ? ab : cd)));
    return e;
  }
#endif
#endif
  DS_UNROLL
  for (int j = 0; j < Count; j++) {
    DS_UNROLL
    for (int k = 0; k < Lanes<D>::count; k++) {
      const float value = element<D>(x[j], k);
      const int bits = static_cast<int>(to_bits(value) & 0x7fffffffu);
      e.magnitude = bits > e.magnitude ? bits : e.magnitude;
      if constexpr (Zero) e.minus_lo = fmaxf(e.minus_lo, -value), e.hi = fmaxf(e.hi, value);
    }
  }
  return e;
}

// Scale, zero point and inverse of a group, from the bits of its largest magnitude (infinities and NaN compare above every number), the
// largest -x and the largest x. Lane 0 of the group stores them.
template <Kind K>
DS_FN Mapping map_group(float maximum, int bits, int magnitude, float minus_lo, float hi, float *params, bool first) {
  float scale = from_bits(0x7fc00000u), zero = 0.0f, inverse = 0.0f;
  const bool ok = magnitude < 0x7f800000;
  if (ok) {
    const float levels = static_cast<float>((1 << bits) - 1);
    scale = K == Kind::asymmetric ? hi / levels + minus_lo / levels : from_bits(static_cast<std::uint32_t>(magnitude)) / maximum;
    scale = scale < smallest_scale ? smallest_scale : scale;
    inverse = 1.0f / scale;
    if (K == Kind::asymmetric) zero = rintf(minus_lo * inverse) + 0.0f;  // no negative zero
  }
  if (first) {
    params[0] = scale;
    if (K == Kind::asymmetric) params[1] = zero;
  }
  return {inverse, static_cast<int>(zero), ok};
}

// ---- sixteen codes at aligned addresses ---------------------------------------------------------------------------------

// `Count` words of codes, from the address of a multiple of `Align` bytes.
template <int Count, int Align>
DS_FN void load_codes(const unsigned char *p, std::uint32_t *w) {
  if constexpr (Align >= 16 && Count % 4 == 0) {
    DS_UNROLL
    for (int k = 0; k < Count / 4; k++) {
      const Words x = load_words(p, k);
      DS_UNROLL
      for (int j = 0; j < 4; j++) w[4 * k + j] = x.w[j];
    }
  } else if constexpr (Align >= 8 && Count % 2 == 0) {
    DS_UNROLL
    for (int k = 0; k < Count / 2; k++) {
      const HalfWords x = reinterpret_cast<const HalfWords *>(p)[k];
      w[2 * k] = x.w[0], w[2 * k + 1] = x.w[1];
    }
  } else {
    DS_UNROLL
    for (int k = 0; k < Count; k++) w[k] = reinterpret_cast<const std::uint32_t *>(p)[k];
  }
}
template <int Count, int Align>
DS_FN void store_codes(unsigned char *p, const std::uint32_t *w) {
  if constexpr (Align >= 16 && Count % 4 == 0) {
    DS_UNROLL
    for (int k = 0; k < Count / 4; k++) store_words(p, k, Words{{w[4 * k], w[4 * k + 1], w[4 * k + 2], w[4 * k + 3]}});
  } else if constexpr (Align >= 8 && Count % 2 == 0) {
    DS_UNROLL
    for (int k = 0; k < Count / 2; k++) reinterpret_cast<HalfWords *>(p)[k] = HalfWords{{w[2 * k], w[2 * k + 1]}};
  } else {
    DS_UNROLL
    for (int k = 0; k < Count; k++) reinterpret_cast<std::uint32_t *>(p)[k] = w[k];
  }
}

// The integer codes of bytes 0 to 3 of `bytes`, each below 256, as floats plus 2^23: one instruction each.
DS_FN float above_2_23(std::uint32_t bytes, int k) {
  return from_bits(__byte_perm(bytes, 0x4b000000u, 0x7440u | static_cast<std::uint32_t>(k)));
}

// The values at scale 1 of `Count` codes, packed from the lowest bits of w[0] on.
template <int Bits, int Mantissa, int Bias, bool Zero, int Count>
DS_FN void decode_codes(const std::uint32_t *w, float zero, float *v) {
  if constexpr (Mantissa < 0) {
    // Flipping the highest bit adds half the range to a signed code.
    constexpr std::uint32_t flip = Zero ? 0u : Bits == 8 ? 0x80808080u : 0x88888888u;
    constexpr float base = 8388608.0f + (Zero ? 0 : 1 << (Bits - 1));
    constexpr int halves = 8 / Bits;  // of a byte
    DS_UNROLL
    for (int k = 0; k < Count * Bits / 32; k++) {
      DS_UNROLL
      for (int half = 0; half < halves; half++) {
        const std::uint32_t bytes = Bits == 8 ? w[k] ^ flip : (w[k] ^ flip) >> 4 * half & 0x0f0f0f0fu;
        DS_UNROLL
        for (int j = 0; j < 4; j++) {
          float &out = v[(4 * k + j) * halves + half];
          out = above_2_23(bytes, j) - base;
          if constexpr (Zero) out -= zero;
        }
      }
    }
  } else {
    // The code's magnitude, put where fp32 has its lowest exponent bits and its highest of the mantissa, is the value times
    // 2^(bias - 127), of subnormal codes too: fp32 has them at the same place. The sign goes to the sign.
    constexpr int down = 9 - Bits + Mantissa;
    constexpr std::uint32_t mask = 0x80000000u | ((1u << (Bits - 1)) - 1u) << (23 - Mantissa);
    DS_UNROLL
    for (int k = 0; k < Count; k++) {
      const int at = k * Bits, word = at / 32, bit = at % 32;
      const bool across = bit + Bits > 32;
      const std::uint32_t top = across ? __funnelshift_l(w[word], w[across ? word + 1 : word], across ? 64 - Bits - bit : 0)
                                       : w[word] << (across ? 0 : 32 - Bits - bit);
      v[k] = from_bits(static_cast<std::uint32_t>(static_cast<std::int32_t>(top) >> down) & mask) *
             from_bits(static_cast<std::uint32_t>(254 - Bias) << 23);
    }
  }
}

// The code of y. Of integers: plus 0x4b400000, less the zero point, and of signed ones that are not drawn plus half the range; `encode_codes`
// mends that for a whole word at once.
template <int Bits, int Mantissa, int Bias, int MaxCode, bool Zero, bool Draws>
DS_FN std::uint32_t encode_one(const Code &c, float y, float zero, std::int64_t index) {
  if constexpr (Mantissa < 0 && !Draws && !Zero) {
    return to_bits(y + (whole + static_cast<float>(1 << (Bits - 1))));  // no clamp: the largest magnitude maps to MaxCode within an ulp
  } else if constexpr (Mantissa < 0) {
    // The limits are whole numbers, so that it is the same to round before or after them.
    const float x = Draws ? y + draw(c, index) : y, low = Zero ? -zero : static_cast<float>(-MaxCode);
    const float top = Zero ? static_cast<float>((1 << Bits) - 1) - zero : static_cast<float>(MaxCode);
    return to_bits(fmaxf(fminf(x, top), low) + whole);
  } else {
    constexpr std::uint32_t lowest = 128 - Bias, places = static_cast<std::uint32_t>(23 - Mantissa) << 23;
    const std::uint32_t bits = to_bits(y), sign = bits >> (32 - Bits) & 1u << (Bits - 1);
    std::uint32_t exponent = bits & 0x7f800000u, code;  // in place
    if constexpr (Draws) {
      exponent = exponent > lowest << 23 ? exponent : lowest << 23;
      const float units = fabsf(y) * from_bits((static_cast<std::uint32_t>(254 + Mantissa) << 23) - exponent);
      code = to_bits(units + draw(c, index) + whole) - 0x4b400000u + (exponent >> (23 - Mantissa)) - (lowest << Mantissa);
      code = static_cast<std::int32_t>(code) > MaxCode ? static_cast<std::uint32_t>(MaxCode) : code;
    } else {
      // What is added has the code's last place as its own, so the sum is rounded there.
      std::uint32_t unit = exponent + places;
      unit = unit > (lowest << 23) + places ? unit : (lowest << 23) + places;
      code = to_bits(fabsf(y) + from_bits(unit)) - unit - ((lowest << Mantissa) + (places >> (23 - Mantissa))) + (unit >> (23 - Mantissa));
    }
    return code | sign;
  }
}

// `Count` codes of y * inverse into words.
template <int Bits, int Mantissa, int Bias, int MaxCode, bool Zero, bool Draws, int Count>
DS_FN void encode_codes(const Code &c, const Mapping &m, const float *x, std::int64_t index, std::uint32_t *w) {
  constexpr int run = Bits == 6 ? 4 : 32 / Bits;  // codes of one sum
  constexpr bool shifted = Mantissa < 0 && !Zero;  // codes plus half the range, which flipping the highest bit takes back
  constexpr std::uint32_t flip = !shifted ? 0u : Bits == 8 ? 0x80808080u : 0x88888888u;
  constexpr std::uint32_t ones = Bits == 8 ? 0x01010101u : 0x11111111u;
  const std::uint32_t less = Mantissa >= 0 ? 0u : Zero ? 0x4b400000u - static_cast<std::uint32_t>(m.zero) : Draws ? 0x4b400000u - (1u << (Bits - 1)) : 0x4b400000u;
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 890
  constexpr bool e4m3 = Mantissa == 3 && Bias == 7, e5m2 = Mantissa == 2 && Bias == 15;
  if constexpr (Bits == 8 && !Draws && (e4m3 || e5m2)) {  // the same bits: values above the largest code do not occur
    DS_UNROLL
    for (int k = 0; k < Count / 4; k++) {
      std::uint16_t half[2];
      DS_UNROLL
      for (int j = 0; j < 2; j++) {
        const float low = x[4 * k + 2 * j] * m.inverse, high = x[4 * k + 2 * j + 1] * m.inverse;
        if constexpr (e4m3)
          asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(half[j]) : "f"(high), "f"(low));
        else
          asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(half[j]) : "f"(high), "f"(low));
      }
      w[k] = m.finite ? half[0] | static_cast<std::uint32_t>(half[1]) << 16 : 0u;
    }
    return;
  } else
#endif
  {
    std::uint32_t runs[Count / run];
    DS_UNROLL
    for (int r = 0; r < Count / run; r++) {
      std::uint32_t acc = 0;
      DS_UNROLL
      for (int k = run - 1; k >= 0; k--)
        acc = (acc << Bits) + encode_one<Bits, Mantissa, Bias, MaxCode, Zero, Draws>(c, x[r * run + k] * m.inverse, static_cast<float>(m.zero), index + r * run + k);
      runs[r] = m.finite ? (acc - less * ones) ^ flip : 0u;
    }
    if constexpr (Bits == 6) {
      DS_UNROLL
      for (int q = 0; q < Count / 16; q++) {  // four times 24 bits are three words
        const std::uint32_t *b = runs + 4 * q;
        w[3 * q] = b[0] | b[1] << 24;
        w[3 * q + 1] = b[1] >> 8 | b[2] << 16;
        w[3 * q + 2] = b[2] >> 16 | b[3] << 8;
      }
    } else {
      DS_UNROLL
      for (int r = 0; r < Count / run; r++) w[r] = runs[r];
    }
  }
}

// ---- kernels ------------------------------------------------------------------------------------------------------------

// Pieces of 8 codes (16 of 6 bits) to 16-byte stores. Align: of rows of codes, in bytes; Many: more sources than one.
template <int Bits, int Mantissa, int Bias, bool Zero, Dtype D, int Align, bool Many>
DS_FN void dense(const DenseCall &a) {
  constexpr int count = Bits == 6 ? 16 : 8, words = count * Bits / 32, pieces = Many || Bits == 6 ? 2 : 4;
  constexpr int params = Zero ? 2 : 1, stores = count / Lanes<D>::count;
  const std::uint32_t begin = static_cast<std::uint32_t>(block_index()) * (pieces * quant_threads) + thread_index();
  const std::uint32_t all = static_cast<std::uint32_t>(a.pieces), columns = static_cast<std::uint32_t>(a.from.cols) / count;
  const unsigned char *at[pieces], *group[pieces];
  bool there[pieces];
  std::uint32_t w[pieces][words];
  float scale[pieces], zero[pieces], sum[pieces][count];
  DS_UNROLL
  for (int j = 0; j < pieces; j++) {
    const std::uint32_t piece = begin + j * quant_threads;
    there[j] = false;
    if (piece >= all) continue;
    const std::uint32_t row = divide(piece, a.per_row), column = piece - row * columns;
    // Asking on the host whether a row exists would wait for the device: one that does not exist is NaN.
    const std::int64_t source = a.index ? a.index[row] : static_cast<std::int64_t>(row);
    there[j] = !a.index || (source >= 0 && source < a.from.rows);
    const unsigned char *base = a.from.base + source * a.from.row_bytes;
    at[j] = base + column * (count * Bits / 8);
    group[j] = base + a.from.params_at + (column * count >> a.group_shift) * (4 * params);
  }
  for (std::int64_t k = 0; k < (Many ? a.sources : 1); k++) {
    const std::int64_t ahead = k * a.rows * a.from.row_bytes;
    DS_UNROLL
    for (int j = 0; j < pieces; j++) {
      if (!there[j]) continue;
      load_codes<words, Align>(at[j] + (Many ? ahead : 0), w[j]);
      const float *p = reinterpret_cast<const float *>(group[j] + (Many ? ahead : 0));
      scale[j] = p[0];
      zero[j] = Zero ? p[params - 1] : 0.0f;
    }
    DS_UNROLL
    for (int j = 0; j < pieces; j++) {
      float v[count];
      decode_codes<Bits, Mantissa, Bias, Zero, count>(w[j], zero[j], v);
      DS_UNROLL
      for (int i = 0; i < count; i++) {
        const float value = v[i] * scale[j];
        sum[j][i] = !Many || k == 0 ? value : sum[j][i] + value;
      }
    }
  }
  DS_UNROLL
  for (int j = 0; j < pieces; j++) {
    const std::uint32_t piece = begin + j * quant_threads;
    if (piece >= all) continue;
    DS_UNROLL
    for (int s = 0; s < stores; s++) {
      float v[Lanes<D>::count];
      DS_UNROLL
      for (int i = 0; i < Lanes<D>::count; i++) {
        const float value = Many ? sum[j][s * Lanes<D>::count + i] * a.factor : sum[j][s * Lanes<D>::count + i];
        v[i] = Many || there[j] ? value : from_bits(0x7fc00000u);
      }
      store_words(a.out, static_cast<std::int64_t>(piece) * stores + s, words_of<D>(v));
    }
  }
}

// A group of Team lanes, each with Held pieces of 16 numbers (8 of fp32, but for 6-bit codes). Two groups a team are on their way at once.
template <int Bits, int Mantissa, int Bias, int MaxCode, bool Zero, bool Draws, Dtype D, int Team, int Held, int Align>
DS_FN void quantize(const QuantizeCall &a) {
  constexpr int count = D == Dtype::f32 && Bits != 6 ? 8 : 16, loads = count / Lanes<D>::count, words = count * Bits / 32;
  constexpr int together = Held == 1 ? 2 : 1, teams = quant_threads / Team, group_size = Team * Held * count;
  constexpr Kind kind = Mantissa >= 0 ? Kind::floating : Zero ? Kind::asymmetric : Kind::symmetric;
  constexpr std::uint32_t size = 16 / Lanes<D>::count;
  const std::int64_t stride = a.to.cols * size;
  const int lane = thread_index() % Team;
  const std::uint32_t first = static_cast<std::uint32_t>(block_index()) * (teams * together) + thread_index() / Team;
  const std::uint32_t all = static_cast<std::uint32_t>(a.groups);
  const std::uint32_t cols = static_cast<std::uint32_t>(a.to.cols), per_row = (cols + group_size - 1u) / group_size;
  Words x[together][Held * loads];
  DS_UNROLL
  for (int t = 0; t < together; t++) {
    const std::uint32_t unit = first + t * teams, row = divide(unit, a.per_row), group = unit - row * per_row;
    DS_UNROLL
    for (int j = 0; j < Held * loads; j++) {
      const std::uint32_t i = group * group_size + (j / loads * Team + lane) * count;
      x[t][j] = Words{{0u, 0u, 0u, 0u}};
      if (unit < all && i < cols) x[t][j] = load_words(static_cast<const char *>(a.x) + row * stride + i * size, j % loads);
    }
  }
  DS_UNROLL
  for (int t = 0; t < together; t++) {
    const std::uint32_t unit = first + t * teams, row = divide(unit, a.per_row), group = unit - row * per_row;
    if (unit >= all) return;  // whole teams leave; nothing below waits for others
    Extent e = extent_of<D, Zero, Held * loads>(x[t]);
    if constexpr (Zero) {  // infinities are seen in the extremes, a NaN is made one
      e.hi = shuffle_max<Team>(e.magnitude < 0x7f800000 ? e.hi : from_bits(0x7f800000u));
      e.minus_lo = shuffle_max<Team>(e.minus_lo);
      const float most = fmaxf(e.hi, e.minus_lo);
      e.magnitude = static_cast<int>(to_bits(most) & 0x7fffffffu);
    } else {
      e.magnitude = shuffle_max<Team>(e.magnitude);
    }
    unsigned char *base = a.to.base + (a.order ? a.order[row] : static_cast<std::int64_t>(row)) * a.to.row_bytes;
    float *params = reinterpret_cast<float *>(base + a.to.params_at) + group * (Zero ? 2 : 1);
    const Mapping m = map_group<kind>(a.code.maximum, Bits, e.magnitude, e.minus_lo, e.hi, params, lane == 0);
    DS_UNROLL
    for (int j = 0; j < Held; j++) {
      const std::uint32_t i = group * group_size + (j * Team + lane) * count;
      if (i >= cols) continue;
      float v[count];
      DS_UNROLL
      for (int k = 0; k < count; k++) v[k] = element<D>(x[t][j * loads + k / Lanes<D>::count], k % Lanes<D>::count);
      std::uint32_t w[words];
      encode_codes<Bits, Mantissa, Bias, MaxCode, Zero, Draws, count>(a.code, m, v, a.code.offset + row * a.to.cols + i, w);
      store_codes<words, Align>(base + i / count * (count * Bits / 8), w);
    }
  }
}

// ---- rows of any length and group, at any address ---------------------------------------------------------------------

DS_FN int bytes_of(int codes, int width) { return (codes * width + 7) / 8; }

// Where numbers come from: dense rows, or the sum of quantized ones. Four neighbours are whole bytes at every code width.
struct DenseSource {
  const QuantizeCall &call;
};
DS_FN Quad quad_at(const DenseSource &d, std::int64_t row, std::int64_t i, int m) {
  return load_quad(d.call.x, static_cast<Dtype>(d.call.dtype), row * d.call.to.cols + i, m);
}
template <Kind K>
DS_FN Quad sum_at(const Rows &q, const Code &code, std::int64_t sources, std::int64_t rows, float factor, std::int64_t row, std::int64_t i, int m) {
  const int width = code.bits;
  constexpr int params = K == Kind::asymmetric ? 2 : 1;
  const bool one = q.group % 4 == 0;  // neighbours may lie in two groups; not where a group is a whole number of quads
  const std::int64_t first = quotient(i, q.group);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  for (std::int64_t k = 0; k < sources; k++) {
    const unsigned char *base = q.base + (k * rows + row) * q.row_bytes;
    const float *p = reinterpret_cast<const float *>(base + q.params_at);
    std::uint32_t packed = 0;
    for (int b = 0; b < bytes_of(m, width); b++) packed |= static_cast<std::uint32_t>(base[i * width / 8 + b]) << (8 * b);
    DS_UNROLL
    for (int j = 0; j < 4; j++) {
      if (j >= m) continue;
      const std::int64_t group = one ? first : quotient(i + j, q.group);
      const std::uint32_t bits = packed >> (width * j) & ((1u << width) - 1u);
      const float value = decode<K>(code, bits, params == 2 ? p[2 * group + 1] : 0.0f) * p[params * group];
      sum.v[j] = k == 0 ? value : sum.v[j] + value;
    }
  }
  if (factor != 1.0f) {
    DS_UNROLL
    for (int j = 0; j < 4; j++) sum.v[j] *= factor;
  }
  return sum;
}
template <Kind K>
struct SumSource {
  const QuantizeCall &call;
};
template <Kind K>
DS_FN Quad quad_at(const SumSource<K> &s, std::int64_t row, std::int64_t i, int m) {
  return sum_at<K>(s.call.from, s.call.from_code, s.call.sources, s.call.to.rows, s.call.factor, row, i, m);
}

constexpr int dense_quads = 4;  // that one thread of `any_dense` writes

template <Kind K>
DS_FN void any_dense(const DenseCall &a) {
  const std::int64_t quads = (a.from.cols + 3) / 4, begin = block_index() * (dense_quads * quant_threads) + thread_index();
  const float nan = from_bits(0x7fc00000u);
  for (int j = 0; j < dense_quads; j++) {
    const std::int64_t piece = begin + j * quant_threads, row = quotient(piece, quads), i = 4 * (piece - row * quads);
    if (row >= a.rows) return;
    const std::int64_t source = a.index ? a.index[row] : row;
    const bool there = !a.index || (source >= 0 && source < a.from.rows);
    const int m = quad_size(i, a.from.cols);
    const Quad x = there ? sum_at<K>(a.from, a.code, a.sources, a.rows, a.factor, source, i, m) : Quad{{nan, nan, nan, nan}};
    store_quad(a.out, static_cast<Dtype>(a.dtype), row * a.from.cols + i, m, x);
  }
}

template <Kind K, class Source>
DS_FN void any_quantize_from(const QuantizeCall &a, const Source &from) {
  const std::int64_t unit = block_index() * (quant_threads / warp_threads) + thread_index() / warp_threads;
  if (unit >= a.groups) return;
  const int lane = thread_index() % warp_threads, width = a.code.bits;
  const std::int64_t groups = (a.to.cols + a.to.group - 1) / a.to.group;
  const std::int64_t row = quotient(unit, groups), group = unit - row * groups, first = group * a.to.group;
  const std::int64_t end = a.to.cols - first < a.to.group ? a.to.cols : first + a.to.group;
  unsigned char *base = a.to.base + (a.order ? a.order[row] : row) * a.to.row_bytes;
  int magnitude = 0;
  float minus_lo = 0.0f, hi = 0.0f;
  for (std::int64_t i = first + 4 * lane; i < end; i += 4 * warp_threads) {
    const Quad x = quad_at(from, row, i, quad_size(i, end));
    DS_UNROLL
    for (int k = 0; k < 4; k++) {
      const int bits = static_cast<int>(to_bits(x.v[k]) & 0x7fffffffu);
      magnitude = bits > magnitude ? bits : magnitude;
      minus_lo = -x.v[k] > minus_lo ? -x.v[k] : minus_lo;
      hi = x.v[k] > hi ? x.v[k] : hi;
    }
  }
  magnitude = shuffle_max<warp_threads>(magnitude);
  minus_lo = shuffle_max<warp_threads>(minus_lo);
  hi = shuffle_max<warp_threads>(hi);
  float *params = reinterpret_cast<float *>(base + a.to.params_at) + group * (K == Kind::asymmetric ? 2 : 1);
  const Mapping m = map_group<K>(a.code.maximum, width, magnitude, minus_lo, hi, params, lane == 0);
  unsigned char *codes = base + first * width / 8;
  for (std::int64_t i = 4 * lane; i < end - first; i += 4 * warp_threads) {
    const int n = quad_size(first + i, end);
    const Quad x = quad_at(from, row, first + i, n);
    std::uint32_t packed = 0;
    DS_UNROLL
    for (int k = 0; k < 4; k++)
      if (k < n) packed |= encode<K>(a.code, m, x.v[k], a.code.offset + row * a.to.cols + first + i + k) << (width * k);
    for (int b = 0; b < bytes_of(n, width); b++) codes[i * width / 8 + b] = static_cast<unsigned char>(packed >> (8 * b));
  }
  if (group == groups - 1 && lane == 0)  // padding is sent too, so it is not left to chance
    for (std::int64_t b = (a.to.cols * width + 7) / 8; b < a.to.params_at; b++) base[b] = 0;
}

template <Kind K>
DS_FN void any_quantize(const QuantizeCall &a) {
  any_quantize_from<K>(a, DenseSource{a});
}
template <Kind K, Kind From>
DS_FN void requantize(const QuantizeCall &a) {
  any_quantize_from<K>(a, SumSource<From>{a});
}

}  // namespace ds::cuda
