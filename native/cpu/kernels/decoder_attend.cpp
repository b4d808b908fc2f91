// What happens in a decoder layer between the products: norms, rotation and the write into the cache, attention over
// blocks with a running softmax, activations. All in fp32.
#include <ds/decoder.h>

#include "declare.h"
#include "staging.h"

namespace {

using namespace ds::decoder;

constexpr int keys_at_once = 16, key_vectors = 16 / lanes;
constexpr float none = -__builtin_inff();

// exp by 2^n * p(f): Cody and Waite 1980, section 6; p is the series of 2^f on [-1/2, 1/2] to the seventh term, error below 2 ulp.
DS_INLINE vf exponential(vf x) {
  const vi small = x < -87.0f, big = x > 88.0f;
  x = select(small, splat(-87.0f), select(big, splat(88.0f), x));
  const vf magic = splat(12582912.0f), n = (x * 1.44269504f + magic) - magic;
  const vf f = fma(n, splat(-1.90821493e-10f), fma(n, splat(-0.693147182f), x));
  vf p = splat(1.0f / 5040);
  p = fma(p, f, splat(1.0f / 720));
  p = fma(p, f, splat(1.0f / 120));
  p = fma(p, f, splat(1.0f / 24));
  p = fma(p, f, splat(1.0f / 6));
  p = fma(p, f, splat(0.5f));
  p = fma(p, f, splat(1.0f));
  p = fma(p, f, splat(1.0f));
  const vf power = from_bits((vu)(__builtin_convertvector(n, vi) + 127) << 23);
  return select(small, vf{}, p * power);
}

DS_INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// erf by Abramowitz and Stegun 1964, 7.1.26: absolute error below 1.5e-7.
DS_INLINE vf erf_of(vf x) {
  const vf a = abs(x), t = 1.0f / fma(splat(0.3275911f), a, splat(1.0f));
  vf p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const vf y = 1.0f - p * t * exponential(-(a * a));
  return select(x < 0.0f, -y, y);
}

DS_INLINE vf activated(Activation kind, vf x) {
  switch (kind) {
    case Activation::silu: return x / (1.0f + exponential(-x));
    case Activation::gelu: return 0.5f * x * (1.0f + erf_of(x * 0.707106781f));
    case Activation::gelu_tanh: return 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
    case Activation::relu: return select(x > 0.0f, x, vf{});
    case Activation::quick_gelu: return x / (1.0f + exponential(-1.702f * x));
    case Activation::relu_squared: break;
  }
  const vf y = select(x > 0.0f, x, vf{});
  return y * y;
}

DS_INLINE float sum_of(vf x) {
  float all = 0.0f;
#if defined(__AVX512F__) && DS_LANES == 16
  all = _mm512_reduce_add_ps((__m512)x);
#else
  for (int l = 0; l < lanes; l++) all += x[l];
#endif
  return all;
}

DS_INLINE float largest(vf x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float all = x[0];
  for (int l = 1; l < lanes; l++) all = x[l] > all ? x[l] : all;
  return all;
#endif
}

DS_INLINE float exp_of(float x) { return exponential(splat(x))[0]; }

DS_INLINE float dot(const float *a, const float *b, Word n) {
  vf sum = {};
  each_vector(
      n, [&](Word i) { sum = fma(load<vf>(a + i), load<vf>(b + i), sum); },
      [&](Word i, Word r) { sum = fma(load_part<vf>(a + i, r), load_part<vf>(b + i, r), sum); });
  return sum_of(sum);
}

// y = y * by + x * a
DS_INLINE void add_scaled(float *y, float by, const float *x, float a, Word n) {
  each_vector(
      n, [&](Word i) { store(y + i, fma(a, load<vf>(x + i), by * load<vf>(y + i))); },
      [&](Word i, Word r) { store_part(y + i, fma(a, load_part<vf>(x + i, r), by * load_part<vf>(y + i, r)), r); });
}

static void norm_row(const Normed &n, const float *x, Word size, float *out) {
  float sum = 0.0f, squares = 0.0f;
  if (n.kind == 1) {
    vf all = {};
    each_vector(size, [&](Word i) { all += load<vf>(x + i); }, [&](Word i, Word r) { all += load_part<vf>(x + i, r); });
    sum = sum_of(all) / static_cast<float>(size);
  }
  vf all = {};
  each_vector(
      size,
      [&](Word i) {
        const vf d = load<vf>(x + i) - sum;
        all = fma(d, d, all);
      },
      [&](Word i, Word r) {
        for (Word j = i; j < i + r; j++) squares += (x[j] - sum) * (x[j] - sum);
      });
  const float mean = (squares + sum_of(all)) / static_cast<float>(size);
  const float by = 1.0f / __builtin_sqrtf(mean + static_cast<float>(n.eps)), offset = static_cast<float>(n.offset);
  const auto one = [&](vf v, vf w, vf b) { return (v - sum) * by * (w + offset) + b; };
  const float *bias = n.bias;
  each_vector(
      size,
      [&](Word i) { store(out + i, one(load<vf>(x + i), load<vf>(n.weight + i), bias ? load<vf>(bias + i) : vf{})); },
      [&](Word i, Word r) {
        const vf b = bias ? load_part<vf>(bias + i, r) : vf{};
        store_part(out + i, one(load_part<vf>(x + i, r), load_part<vf>(n.weight + i, r), b), r);
      });
}

static void rotate(const Layer &y, const float *cos, const float *sin, float *x) {
  const Word half = y.rope_dim / 2;
  if (y.interleaved) {
    for (Word i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (Word i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// One head's numbers into the cache, at number `at` of [slots * kv_heads] heads.
static void keep(Kept kept, void *base, float *scales, Word at, Word n, const float *x) {
  if (kept == Kept::f32) {
    std::memcpy(static_cast<float *>(base) + at * n, x, static_cast<std::size_t>(n) * 4);
  } else if (kept == Kept::bf16) {
    narrow(static_cast<std::uint16_t *>(base) + at * n, Dtype::bf16, x, n);
  } else {
    float most = 0.0f;
    for (Word i = 0; i < n; i++) {
      const float a = __builtin_fabsf(x[i]);
      most = a > most ? a : most;
    }
    const float scale = most > 0.0f ? most / 127.0f : 1.0f, inverse = 1.0f / scale, magic = 12582912.0f;
    std::int8_t *codes = static_cast<std::int8_t *>(base) + at * n;
    for (Word i = 0; i < n; i++) codes[i] = static_cast<std::int8_t>((x[i] * inverse + magic) - magic);
    scales[at] = scale;
  }
}

// The same back: fp32, in place where the cache holds fp32.
DS_INLINE const float *kept_row(Kept kept, const void *base, const float *scales, Word at, Word n, float *room) {
  if (kept == Kept::f32) return static_cast<const float *>(base) + at * n;
  if (kept == Kept::bf16) {
    widen(room, static_cast<const std::uint16_t *>(base) + at * n, Dtype::bf16, n);
  } else {
    const std::int8_t *codes = static_cast<const std::int8_t *>(base) + at * n;
    const float scale = scales[at];
    for (Word i = 0; i < n; i++) room[i] = static_cast<float>(codes[i]) * scale;
  }
  return room;
}

// What one call of `attend` works on.
struct Tile {
  const Layer *y;
  Word queries, first, last;  // queries = rows * heads of the group; positions of the first and last row
  float *acc, *most, *sum;    // [queries, value width], [queries], [queries]
};

// 16 keys, positions j.., against one query: scores become shares, and the values join the query's sum.
static void absorb(const Tile &t, Word q, Word position, float slope, Word j, vf (&score)[key_vectors],
                   const float *const *values) {
  const Layer &y = *t.y;
  float weights[keys_at_once];
  float most = none;
  for (int v = 0; v < key_vectors; v++) {
    vf s = score[v] * static_cast<float>(y.scale);
    if (y.softcap != 0.0) s = static_cast<float>(y.softcap) * tanh_of(s / static_cast<float>(y.softcap));
    vf at = {};
    for (int l = 0; l < lanes; l++) at[l] = static_cast<float>(j + v * lanes + l);
    s = fma(slope, at, s);
    const vf mine = splat(static_cast<float>(position));
    vi seen = at <= mine;
    if (y.window) seen &= mine - at < static_cast<float>(y.window);
    score[v] = select(seen, s, splat(none));
    const float here = largest(score[v]);
    most = here > most ? here : most;
  }
  const float before = t.most[q];
  most = most > before ? most : before;
  if (most == none) return;
  const float kept = before == none ? 0.0f : exp_of(before - most);
  float sum = 0.0f;
  for (int v = 0; v < key_vectors; v++) {
    const vf p = exponential(score[v] - most);
    store(weights + v * lanes, p);
    sum += sum_of(p);
  }
  t.most[q] = most;
  t.sum[q] = t.sum[q] * kept + sum;
  float *acc = t.acc + q * y.value_width;
  each_vector(
      y.value_width,
      [&](Word i) {
        vf a = load<vf>(acc + i) * kept;
        for (int k = 0; k < keys_at_once; k++) a = fma(weights[k], load<vf>(values[k] + i), a);
        store(acc + i, a);
      },
      [&](Word i, Word r) {
        vf a = load_part<vf>(acc + i, r) * kept;
        for (int k = 0; k < keys_at_once; k++) a = fma(weights[k], load_part<vf>(values[k] + i, r), a);
        store_part(acc + i, a, r);
      });
}

}  // namespace

namespace ds::DS_ISA {

void decoder_norm(const decoder::Normed &n, const float *x, std::int64_t size, float *out) { norm_row(n, x, size, out); }

void decoder_activate(decoder::Activation kind, const float *gate, const float *value, float *out) {
  for (int v = 0; v < 32; v += lanes) {
    const vf y = activated(kind, load<vf>(gate + v));
    store(out + v, value ? y * load<vf>(value + v) : y);
  }
}

void decoder_place(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row, float *qkv) {
  const Word position = c.start + row - c.first;
  const Word slot = c.blocks[position / s.block_size] * s.block_size + position % s.block_size;
  float *keys = qkv + y.heads * y.width, *values = keys + y.kv_heads * y.width;
  if (y.query_norm.weight && y.whole) {
    norm_row(y.query_norm, qkv, y.heads * y.width, qkv);
    norm_row(y.key_norm, keys, y.kv_heads * y.width, keys);
  }
  const Word turns = y.rope < 0 ? 0 : (y.rope * s.rows + row) * s.rope_stride;
  for (Word h = 0; h < y.heads + y.kv_heads; h++) {
    float *x = qkv + h * y.width;
    const Normed &n = h < y.heads ? y.query_norm : y.key_norm;
    if (n.weight && !y.whole) norm_row(n, x, y.width, x);
    if (y.rope >= 0) rotate(y, s.cos + turns, s.sin + turns, x);
  }
  for (Word h = 0; h < y.kv_heads; h++) {
    keep(s.kept, y.keys, y.key_scales, slot * y.kv_heads + h, y.width, keys + h * y.width);
    keep(s.kept, y.values, y.value_scales, slot * y.kv_heads + h, y.value_width, values + h * y.value_width);
  }
}

void decoder_attend(const decoder::Step &s, const decoder::Layer &y, const decoder::Attend &a, float *scratch) {
  const Word group = y.heads / y.kv_heads, queries = a.rows * group, width = y.width, wide = y.value_width;
  float *key_rows = scratch, *turned = key_rows + keys_at_once * width, *value_rows = turned + keys_at_once * width;
  Tile t = {&y, queries, a.chunk->start + a.row - a.chunk->first, 0, value_rows + keys_at_once * wide, nullptr, nullptr};
  t.most = t.acc + queries * wide;
  t.sum = t.most + queries;
  t.last = t.first + a.rows - 1;
  for (Word q = 0; q < queries; q++) {
    const Word head = a.kv_head * group + q % group;
    t.most[q] = y.sinks ? y.sinks[head] : none;
    t.sum[q] = y.sinks ? 1.0f : 0.0f;
  }
  std::memset(t.acc, 0, static_cast<std::size_t>(queries * wide) * 4);
  const Word begin = y.window && t.first >= y.window ? (t.first - y.window + 1) / keys_at_once * keys_at_once : 0;
  for (Word j = begin; j <= t.last; j += keys_at_once) {
    const float *k[keys_at_once], *v[keys_at_once];
    const Word count = t.last + 1 - j < keys_at_once ? t.last + 1 - j : keys_at_once;
    for (Word i = 0; i < keys_at_once; i++) {
      const Word p = j + (i < count ? i : 0);  // what nobody sees has a weight of zero, and must be a number
      const Word at = (a.chunk->blocks[p / s.block_size] * s.block_size + p % s.block_size) * y.kv_heads + a.kv_head;
      k[i] = kept_row(s.kept, y.keys, y.key_scales, at, width, key_rows + i * width);
      v[i] = kept_row(s.kept, y.values, y.value_scales, at, wide, value_rows + i * wide);
    }
    const bool turn = queries >= 4;
    if (turn)
      for (Word i = 0; i < keys_at_once; i++)
        for (Word w = 0; w < width; w++) turned[w * keys_at_once + i] = k[i][w];
    for (Word q = 0; q < queries; q++) {
      const Word row = q / group, head = a.kv_head * group + q % group, position = t.first + row;
      if (position < j) continue;
      const float *x = a.qkv + (a.row + row) * a.qkv_stride + head * width;
      vf score[key_vectors] = {};
      if (turn) {
        vf other[key_vectors] = {};
        Word w = 0;
        for (; w + 2 <= width; w += 2)
          for (int n = 0; n < key_vectors; n++) {
            score[n] = fma(x[w], load<vf>(turned + w * keys_at_once + n * lanes), score[n]);
            other[n] = fma(x[w + 1], load<vf>(turned + (w + 1) * keys_at_once + n * lanes), other[n]);
          }
        for (; w < width; w++)
          for (int n = 0; n < key_vectors; n++)
            score[n] = fma(x[w], load<vf>(turned + w * keys_at_once + n * lanes), score[n]);
        for (int n = 0; n < key_vectors; n++) score[n] += other[n];
      } else {
        float dots[keys_at_once];
        for (int i = 0; i < keys_at_once; i++) dots[i] = dot(x, k[i], width);
        for (int n = 0; n < key_vectors; n++) score[n] = load<vf>(dots + n * lanes);
      }
      absorb(t, q, position, y.slopes ? y.slopes[head] : 0.0f, j, score, v);
    }
  }
  for (Word q = 0; q < queries; q++) {
    const Word row = q / group, head = a.kv_head * group + q % group;
    float *out = a.out + (a.row + row) * a.out_stride + head * wide;
    add_scaled(t.acc + q * wide, 1.0f / t.sum[q], t.acc + q * wide, 0.0f, wide);
    std::memcpy(out, t.acc + q * wide, static_cast<std::size_t>(wide) * 4);
  }
}

}  // namespace ds::DS_ISA
