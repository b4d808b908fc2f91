// Eight lanes make one group, a warp if it is long: what is done once a group (its place, its scale) takes as long as a dozen elements.
// A lane takes four neighbours at a time, which are whole bytes at every code width.
#include "cuda.h"

namespace ds::cuda {
namespace {

constexpr float smallest_scale = 1.17549435e-38f;  // so that its inverse is finite

// ---- codes of one element; the same arithmetic as cpu/kernels/quant.cpp ---------------------------------------------

// What a format is made of, known when a kernel is compiled: asking at every element took longer than the element.
enum class Kind { symmetric, asymmetric, floating };

struct Mapping {  // codes = f(x * inverse) of one group
  float inverse;
  int zero;
  bool finite;
};

DS_FN float draw(const QuantSpec &s, std::int64_t index) {
  const std::uint32_t hi = static_cast<std::uint32_t>(static_cast<std::uint64_t>(index) >> 32);
  std::uint32_t x = static_cast<std::uint32_t>(index) ^ s.key[0];
  x = (x ^ (x >> 16)) * 0x7feb352du + s.key[1] + hi * 0x9e3779b9u;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return (static_cast<float>(static_cast<std::int32_t>(x ^ (x >> 16)) >> 8) + 0.5f) * 5.9604644775390625e-8f;
}
DS_FN int round_to_int(const QuantSpec &s, float y, std::int64_t index) {
  return static_cast<int>(rintf(s.stochastic ? y + draw(s, index) : y));
}

template <Kind K>
DS_FN std::uint32_t encode(const QuantSpec &s, const Mapping &m, float x, std::int64_t index) {
  const QuantFormat &f = s.format;
  if (!m.finite) return 0;
  const float y = x * m.inverse;
  if (K != Kind::floating) {
    const int top = K == Kind::symmetric ? f.max_code : (1 << f.bits) - 1, low = K == Kind::symmetric ? -top : 0;
    int q = round_to_int(s, y, index) + m.zero;
    q = q > top ? top : q < low ? low : q;
    return static_cast<std::uint32_t>(q) & ((1u << f.bits) - 1u);
  }
  const int magnitude = static_cast<int>(to_bits(y) & 0x7fffffffu), lowest = 128 - f.bias;
  const int exponent = (magnitude >> 23) > lowest ? magnitude >> 23 : lowest;
  const float units = from_bits(static_cast<std::uint32_t>(magnitude)) *
                      from_bits(static_cast<std::uint32_t>(254 + f.mantissa - exponent) << 23);
  const int code = round_to_int(s, units, index) + ((exponent - lowest) << f.mantissa);
  return static_cast<std::uint32_t>(code > f.max_code ? f.max_code : code) | (to_bits(y) >> 31) << (f.bits - 1);
}

template <Kind K>
DS_FN float decode(const QuantSpec &s, std::uint32_t code, float zero) {
  const QuantFormat &f = s.format;
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

// ---- four codes in memory -------------------------------------------------------------------------------------------

DS_FN int bytes_of(int codes, int width) { return (codes * width + 7) / 8; }

DS_FN void store_codes(unsigned char *p, std::uint32_t packed, int bytes) {
  if (bytes == 4 && reinterpret_cast<std::uintptr_t>(p) % 4 == 0) {
    *reinterpret_cast<std::uint32_t *>(p) = packed;
    return;
  }
  if (bytes == 2 && reinterpret_cast<std::uintptr_t>(p) % 2 == 0) {
    *reinterpret_cast<std::uint16_t *>(p) = static_cast<std::uint16_t>(packed);
    return;
  }
  for (int b = 0; b < 4; b++)
    if (b < bytes) p[b] = static_cast<unsigned char>(packed >> (8 * b));
}
DS_FN std::uint32_t load_codes(const unsigned char *p, int bytes) {
  if (bytes == 4 && reinterpret_cast<std::uintptr_t>(p) % 4 == 0) return *reinterpret_cast<const std::uint32_t *>(p);
  if (bytes == 2 && reinterpret_cast<std::uintptr_t>(p) % 2 == 0) return *reinterpret_cast<const std::uint16_t *>(p);
  std::uint32_t packed = 0;
  for (int b = 0; b < 4; b++)
    if (b < bytes) packed |= static_cast<std::uint32_t>(p[b]) << (8 * b);
  return packed;
}

// ---- where numbers come from: dense rows, or the sum of quantized ones ----------------------------------------------

struct Dense {
  const void *x;
  Dtype dtype;
  std::int64_t cols;
};
DS_FN Quad quad_at(const Dense &d, std::int64_t row, std::int64_t i, int m) {
  return load_quad(d.x, d.dtype, row * d.cols + i, m);
}

struct Sum {  // factor * the sum over `sources` of row k * rows + r
  QuantSpec spec;
  QuantRows q;
  std::int64_t sources, rows;
  float factor;
};
template <Kind K>
struct SumOf : Sum {};
template <Kind K>
DS_FN Quad quad_at(const SumOf<K> &s, std::int64_t row, std::int64_t i, int m) {
  const int width = s.spec.format.bits;
  constexpr int params = K == Kind::asymmetric ? 2 : 1;
  const std::int64_t byte = i * width / 8;
  // Neighbours may lie in two groups; not where a group is a whole number of quads.
  const bool one = s.spec.group % 4 == 0;
  const std::int64_t first = quotient(i, s.spec.group);
  Quad sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  for (std::int64_t k = 0; k < s.sources; k++) {
    const unsigned char *base = s.q.base + (k * s.rows + row) * s.q.row_bytes;
    const float *p = reinterpret_cast<const float *>(base + s.q.params_at);
    const std::uint32_t packed = load_codes(base + byte, bytes_of(m, width));
    for (int j = 0; j < 4; j++) {
      if (j >= m) continue;
      const std::int64_t group = one ? first : quotient(i + j, s.spec.group);
      const std::uint32_t code = packed >> (width * j) & ((1u << width) - 1u);
      const float value = decode<K>(s.spec, code, params == 2 ? p[2 * group + 1] : 0.0f) * p[params * group];
      sum.v[j] = k == 0 ? value : sum.v[j] + value;
    }
  }
  if (s.factor != 1.0f)
    for (int j = 0; j < 4; j++) sum.v[j] *= s.factor;
  return sum;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <int Lanes>
DS_FN int lane() {
  return static_cast<int>(threadIdx.x) % Lanes;
}
template <int Lanes>
DS_FN std::int64_t team() {
  return blockIdx.x * static_cast<std::int64_t>(block_threads / Lanes) + static_cast<int>(threadIdx.x) / Lanes;
}
template <int Lanes, class T>
DS_FN T team_max(T x) {
  const int first = static_cast<int>(threadIdx.x) % warp_threads / Lanes * Lanes;
  const unsigned others = Lanes == warp_threads ? 0xffffffffu : ((1u << (Lanes % warp_threads)) - 1u) << first;
  for (int k = Lanes / 2; k > 0; k /= 2) {
    const T other = __shfl_xor_sync(others, x, k);
    x = other > x ? other : x;
  }
  return x;
}

template <Kind K, int Lanes, class Source>
DS_FN Mapping map_group(const QuantSpec &s, const Source &from, std::int64_t row, std::int64_t first, std::int64_t end,
                        float *params) {
  int magnitude = 0;  // bits of the largest |x|: infinities and NaN compare above every number
  float minus_lo = 0.0f, hi = 0.0f;
  for (std::int64_t i = first + 4 * lane<Lanes>(); i < end; i += 4 * Lanes) {
    const Quad x = quad_at(from, row, i, quad_size(i, end));
    for (int k = 0; k < 4; k++) {
      const int bits = static_cast<int>(to_bits(x.v[k]) & 0x7fffffffu);
      magnitude = bits > magnitude ? bits : magnitude;
      if (K != Kind::asymmetric) continue;
      minus_lo = -x.v[k] > minus_lo ? -x.v[k] : minus_lo;
      hi = x.v[k] > hi ? x.v[k] : hi;
    }
  }
  magnitude = team_max<Lanes>(magnitude);
  if (K == Kind::asymmetric) {
    minus_lo = team_max<Lanes>(minus_lo);
    hi = team_max<Lanes>(hi);
  }
  float scale = from_bits(0x7fc00000u), zero = 0.0f, inverse = 0.0f;
  const bool ok = magnitude < 0x7f800000;
  if (ok) {
    const float levels = static_cast<float>((1 << s.format.bits) - 1);
    scale = K == Kind::asymmetric ? hi / levels + minus_lo / levels
                                  : from_bits(static_cast<std::uint32_t>(magnitude)) / s.format.maximum;
    scale = scale < smallest_scale ? smallest_scale : scale;
    inverse = 1.0f / scale;
    if (K == Kind::asymmetric) zero = rintf(minus_lo * inverse);
  }
  if (lane<Lanes>() == 0) {
    params[0] = scale;
    if (K == Kind::asymmetric) params[1] = zero;
  }
  return {inverse, static_cast<int>(zero), ok};
}

template <Kind K, int Lanes, class Source>
DS_KERNEL void quantize_kernel(QuantSpec s, QuantRows q, Source from, const std::int64_t *order, std::int64_t groups) {
  const std::int64_t unit = team<Lanes>();
  if (unit >= q.rows * groups) return;  // whole teams leave; nothing below waits for others
  const std::int64_t row = quotient(unit, groups), group = unit - row * groups, first = group * s.group;
  const std::int64_t end = q.cols - first < s.group ? q.cols : first + s.group;
  unsigned char *base = q.base + (order ? order[row] : row) * q.row_bytes;
  float *params = reinterpret_cast<float *>(base + q.params_at) + group * (K == Kind::asymmetric ? 2 : 1);
  const Mapping m = map_group<K, Lanes>(s, from, row, first, end, params);
  const int width = s.format.bits;
  unsigned char *codes = base + first * width / 8;
  for (std::int64_t i = 4 * lane<Lanes>(); i < end - first; i += 4 * Lanes) {
    const int n = quad_size(first + i, end);
    const Quad x = quad_at(from, row, first + i, n);
    std::uint32_t packed = 0;
    for (int k = 0; k < n; k++)
      packed |= encode<K>(s, m, x.v[k], s.offset + row * q.cols + first + i + k) << (width * k);
    store_codes(codes + i * width / 8, packed, bytes_of(n, width));
  }
  if (group == groups - 1 && lane<Lanes>() == 0)  // padding is sent too, so it is not left to chance
    for (std::int64_t b = (q.cols * width + 7) / 8; b < q.params_at; b++) base[b] = 0;
}

constexpr int dense_quads = 4;                                         // that one thread writes
constexpr std::int64_t dense_chunk = 4 * dense_quads * block_threads;  // elements of a row that one block writes

template <Kind K>
DS_KERNEL void dense_kernel(SumOf<K> from, const std::int64_t *index, std::int64_t chunks, void *out, Dtype dtype) {
  const std::int64_t block = blockIdx.x, row = quotient(block, chunks), begin = (block - row * chunks) * dense_chunk;
  const std::int64_t source = index ? index[row] : row;
  // Asking on the host whether a row exists would wait for the device: one that does not exist is NaN.
  const float nan = from_bits(0x7fc00000u);
  const bool there = !index || (source >= 0 && source < from.q.rows);
  DS_UNROLL
  for (int j = 0; j < dense_quads; j++) {
    const std::int64_t i = begin + 4 * (static_cast<std::int64_t>(threadIdx.x) + j * block_threads);
    if (i >= from.q.cols) return;
    const int m = quad_size(i, from.q.cols);
    store_quad(out, dtype, row * from.q.cols + i, m, there ? quad_at(from, source, i, m) : Quad{{nan, nan, nan, nan}});
  }
}

bool usable(const QuantSpec &s, const QuantRows &q) {
  const QuantFormat &f = s.format;
  if (f.bits != 4 && f.bits != 6 && f.bits != 8) return false;
  // Lanes take four neighbours from a group's start on, so a byte of 4-bit codes never has two writers.
  if (s.group < 1 || s.group * f.bits % 8 != 0 || (!s.symmetric && f.mantissa >= 0)) return false;
  if (q.rows < 0 || q.cols < 0 || q.params_at % 4 != 0 || q.row_bytes % 4 != 0) return false;
  if (q.params_at < (q.cols * f.bits + 7) / 8) return false;
  if (q.row_bytes < q.params_at + quant_groups(s, q.cols) * quant_params(s) * 4) return false;
  return q.base || q.rows * q.cols == 0;
}

Kind kind_of(const QuantSpec &s) {
  return s.format.mantissa >= 0 ? Kind::floating : s.symmetric ? Kind::symmetric : Kind::asymmetric;
}

template <Kind K>
Status dense_as(const Sum &from, const std::int64_t *index, std::int64_t rows, void *out, Dtype dtype, Stream stream) {
  const std::int64_t chunks = (from.q.cols + dense_chunk - 1) / dense_chunk;
  return launch(dense_kernel<K>, rows * chunks, stream, SumOf<K>{from}, index, chunks, out, dtype);
}

Status dense(const Sum &from, const std::int64_t *index, std::int64_t rows, void *out, Dtype dtype, Stream stream) {
  if (!out && rows * from.q.cols > 0) return Status::bad_argument;
  switch (kind_of(from.spec)) {
    case Kind::symmetric: return dense_as<Kind::symmetric>(from, index, rows, out, dtype, stream);
    case Kind::asymmetric: return dense_as<Kind::asymmetric>(from, index, rows, out, dtype, stream);
    case Kind::floating: return dense_as<Kind::floating>(from, index, rows, out, dtype, stream);
  }
  return Status::bad_argument;
}

template <Kind K, int Lanes, class Source>
Status quantize_by(const QuantSpec &s, const QuantRows &q, const Source &from, const std::int64_t *order, Stream stream) {
  const std::int64_t groups = quant_groups(s, q.cols), teams = block_threads / Lanes;
  return launch(quantize_kernel<K, Lanes, Source>, (q.rows * groups + teams - 1) / teams, stream, s, q, from, order, groups);
}

template <Kind K, class Source>
Status quantize_as(const QuantSpec &s, const QuantRows &q, const Source &from, const std::int64_t *order, Stream stream) {
  return s.group <= 512 ? quantize_by<K, 8>(s, q, from, order, stream) : quantize_by<K, warp_threads>(s, q, from, order, stream);
}

template <class Source>
Status quantize_from(const QuantSpec &s, const QuantRows &q, const Source &from, const std::int64_t *order, Stream stream) {
  switch (kind_of(s)) {
    case Kind::symmetric: return quantize_as<Kind::symmetric>(s, q, from, order, stream);
    case Kind::asymmetric: return quantize_as<Kind::asymmetric>(s, q, from, order, stream);
    case Kind::floating: return quantize_as<Kind::floating>(s, q, from, order, stream);
  }
  return Status::bad_argument;
}

}  // namespace

Status quantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *order, const void *x, Dtype dtype,
                Stream stream) {
  if (!usable(s, q) || (!x && q.rows * q.cols > 0)) return Status::bad_argument;
  return quantize_from(s, q, Dense{x, dtype, q.cols}, order, stream);
}

Status dequantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *index, std::int64_t count, void *out,
                  Dtype dtype, Stream stream) {
  if (!usable(s, q) || count < 0 || (!index && count > q.rows)) return Status::bad_argument;
  return dense(Sum{s, q, 1, q.rows, 1.0f}, index, count, out, dtype, stream);
}

Status reduce(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, void *out, Dtype dtype,
              Stream stream) {
  if (!usable(s, q) || sources < 1 || q.rows % sources != 0) return Status::bad_argument;
  return dense(Sum{s, q, sources, q.rows / sources, factor}, nullptr, q.rows / sources, out, dtype, stream);
}

Status reduce_quantized(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, const QuantSpec &so,
                        const QuantRows &out, Stream stream) {
  if (!usable(s, q) || !usable(so, out) || sources < 1 || q.rows % sources != 0) return Status::bad_argument;
  if (so.group % s.group != 0 || out.cols != q.cols || out.rows != q.rows / sources) return Status::bad_argument;
  const Sum sum{s, q, sources, out.rows, factor};
  switch (kind_of(s)) {
    case Kind::symmetric: return quantize_from(so, out, SumOf<Kind::symmetric>{sum}, nullptr, stream);
    case Kind::asymmetric: return quantize_from(so, out, SumOf<Kind::asymmetric>{sum}, nullptr, stream);
    case Kind::floating: return quantize_from(so, out, SumOf<Kind::floating>{sum}, nullptr, stream);
  }
  return Status::bad_argument;
}

}  // namespace ds::cuda
