// What happens in a decoder layer between the products: norms, rotation and the write into the cache, attention over
// blocks with a running softmax, activations. All in fp32.
#include <ds/decoder.h>

#include "declare.h"
#include "staging.h"

namespace {

using namespace ds::decoder;

constexpr int few_keys = 16, few_vectors = 16 / lanes;  // that one query sees at once
constexpr Word few_queries = 8;                         // up to here one after the other
constexpr Word many_keys = 64;
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

// sums[i] = the sum of the lanes of x[i].
DS_INLINE void sums_of(const vf (&x)[few_keys], float *sums) {
#if defined(__AVX512F__) && DS_LANES == 16
  // Pairs of vectors are added so that their sums lie side by side, until one vector is left.
  __m512 four[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    const auto two = [](vf a, vf b) {
      return (__m512d)_mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    };
    const __m512d a = two(x[4 * g], x[4 * g + 1]), b = two(x[4 * g + 2], x[4 * g + 3]);
    four[g] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  const auto fold = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  store(sums, (vf)fold(fold(four[0], four[1]), fold(four[2], four[3])));
#else
  for (int i = 0; i < few_keys; i++) sums[i] = sum_of(x[i]);
#endif
}

// dots[i] = x times row i, of n numbers.
DS_INLINE void dots_of(const float *x, const float *const *rows, Word n, float *dots) {
  vf sum[few_keys] = {};
  each_vector(
      n,
      [&](Word i) {
#pragma GCC unroll 16
        for (int r = 0; r < few_keys; r++) sum[r] = fma(load<vf>(x + i), load<vf>(rows[r] + i), sum[r]);
      },
      [&](Word i, Word left) {
        for (int r = 0; r < few_keys; r++) sum[r] = fma(load_part<vf>(x + i, left), load_part<vf>(rows[r] + i, left), sum[r]);
      });
  sums_of(sum, dots);
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

// The first key that a row at `position`, or one after it, may see; a whole number of small blocks.
DS_INLINE Word first_key(const Layer &y, Word position) {
  return y.window && position >= y.window ? (position - y.window + 1) / few_keys * few_keys : 0;
}

DS_INLINE Word kept_at(const Step &s, const Layer &y, const Attend &a, Word head, Word position) {
  const Word slot = a.chunk->blocks[position / s.block_size] * s.block_size + position % s.block_size;
  return y.latent ? slot : slot * y.kv_heads + head;
}

DS_INLINE void ask(const void *base, Word first, Word bytes) {
  const char *p = static_cast<const char *>(base) + first;
  for (Word i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Asks for what the cache holds of one head at `few_keys` positions from j on, of those up to `last`: a head's numbers of a token are
// short and far apart, so the processor does not foresee them, and would wait for every one.
DS_INLINE void ask_keys(const Step &s, const Layer &y, const Attend &a, Word head, Word j, Word last) {
  const Word item = s.kept == Kept::f32 ? 4 : s.kept == Kept::bf16 ? 2 : 1, end = j + few_keys;
  for (; j < end && j <= last; j++) {
    const Word at = kept_at(s, y, a, head, j);
    ask(y.keys, at * y.width * item, y.width * item);
    if (!y.latent) ask(y.values, at * y.value_width * item, y.value_width * item);
  }
}

DS_INLINE Word first_of(const Attend &a) { return a.chunk->start + a.row - a.chunk->first; }

// scale * score, capped, with its bias of distance, or `none` where a query does not see the key.
DS_INLINE vf seen_score(const Layer &y, vf score, vf key, vf query, vf slope) {
  vf x = score * static_cast<float>(y.scale);
  if (y.softcap != 0.0) x = static_cast<float>(y.softcap) * tanh_of(x / static_cast<float>(y.softcap));
  x = fma(slope, key, x);
  vi seen = key <= query;
  if (y.window) seen &= query - key < static_cast<float>(y.window);
  return select(seen, x, splat(none));
}

// ---- few queries: keys in the lanes, one query after the other

struct Running {
  float most, sum;
};

// 16 keys, positions j.., against one query: scores become shares, and the values join the query's sum.
static void absorb(const Layer &y, Running &t, float *acc, Word position, float slope, Word j, const float *dots,
                   const float *const *values) {
  float weights[few_keys];
  vf score[few_vectors];
  float most = t.most;
  for (int v = 0; v < few_vectors; v++) {
    vf at = {};
    for (int l = 0; l < lanes; l++) at[l] = static_cast<float>(j + v * lanes + l);
    score[v] = seen_score(y, load<vf>(dots + v * lanes), at, splat(static_cast<float>(position)), splat(slope));
    const float here = largest(score[v]);
    most = here > most ? here : most;
  }
  if (most == none) return;
  const float kept = t.most == none ? 0.0f : exp_of(t.most - most);
  float sum = 0.0f;
  for (int v = 0; v < few_vectors; v++) {
    const vf p = exponential(score[v] - most);
    store(weights + v * lanes, p);
    sum += sum_of(p);
  }
  t.most = most;
  t.sum = t.sum * kept + sum;
  each_vector(
      y.value_width,
      [&](Word i) {
        vf all = load<vf>(acc + i) * kept;
        for (int k = 0; k < few_keys; k++) all = fma(weights[k], load<vf>(values[k] + i), all);
        store(acc + i, all);
      },
      [&](Word i, Word r) {
        vf all = load_part<vf>(acc + i, r) * kept;
        for (int k = 0; k < few_keys; k++) all = fma(weights[k], load_part<vf>(values[k] + i, r), all);
        store_part(acc + i, all, r);
      });
}

// Block by block of keys, all heads: what they read of a token lies side by side.
static void each_query(const Step &s, const Layer &y, const Attend &a, float *scratch) {
  const Word group = y.heads / y.kv_heads, queries = a.rows * group, width = y.width, wide = y.value_width;
  float *key_rows = scratch, *value_rows = key_rows + few_keys * width;
  Running *running = reinterpret_cast<Running *>(value_rows + few_keys * wide);
  const Word first = first_of(a), last = first + a.rows - 1;
  const auto result = [&](Word h, Word q) { return a.out + (a.row + q / group) * a.out_stride + (h * group + q % group) * wide; };
  const Word end = a.kv_head + a.kv_heads;
  const auto state = [&](Word h, Word q) -> Running & { return running[(h - a.kv_head) * queries + q]; };
  for (Word h = a.kv_head; h < end; h++)
    for (Word q = 0; q < queries; q++) {
      state(h, q) = {y.sinks ? y.sinks[h * group + q % group] : none, y.sinks ? 1.0f : 0.0f};
      std::memset(result(h, q), 0, static_cast<std::size_t>(wide) * 4);
    }
  for (Word j = first_key(y, first); j <= last; j += few_keys)
    for (Word h = a.kv_head; h < end; h++) {
      if (j + few_keys <= last) {
        ask_keys(s, y, a, h, j + few_keys, last);
      } else if (a.next) {
        const Word start = first_of(*a.next);
        ask_keys(s, y, *a.next, a.next->kv_head + h - a.kv_head, first_key(y, start), start + a.next->rows - 1);
      }
      const float *k[few_keys], *v[few_keys];
      for (Word i = 0; i < few_keys; i++) {
        const Word at = kept_at(s, y, a, h, j + i <= last ? j + i : j);  // what nobody sees has no weight, and must be a number
        k[i] = kept_row(s.kept, y.keys, y.key_scales, at, width, key_rows + i * width);
        v[i] = y.latent ? k[i] : kept_row(s.kept, y.values, y.value_scales, at, wide, value_rows + i * wide);
      }
      for (Word q = 0; q < queries; q++) {
        const Word head = h * group + q % group, position = first + q / group;
        if (position < j) continue;
        const float *x = a.qkv + (a.row + q / group) * a.qkv_stride + head * width;
        float dots[few_keys];
        dots_of(x, k, width, dots);
        absorb(y, state(h, q), result(h, q), position, y.slopes ? y.slopes[head] : 0.0f, j, dots, v);
      }
    }
  for (Word h = a.kv_head; h < end; h++)
    for (Word q = 0; q < queries; q++) add_scaled(result(h, q), 1.0f / state(h, q).sum, result(h, q), 0.0f, wide);
}

// ---- many queries: 32 of them in the lanes, so that maxima, sums and products are of whole vectors (Dao et al. 2023)

constexpr int lane_vectors = 32 / lanes, tile = lanes == 16 ? 8 : 2;

// sums [R][32] += over n steps: number(r, i), R numbers that are the same for all lanes, times lane [n][stride].
template <int R, typename Number>
DS_INLINE void outer(vf (&sum)[R][lane_vectors], const Number &number, const float *lane, Word stride, Word n) {
  for (Word i = 0; i < n; i++) {
    vf of[lane_vectors];
#pragma GCC unroll 8
    for (int v = 0; v < lane_vectors; v++) of[v] = load<vf>(lane + i * stride + v * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const float one = number(r, i);
#pragma GCC unroll 8
      for (int v = 0; v < lane_vectors; v++) sum[r][v] = fma(one, of[v], sum[r][v]);
    }
  }
}

// scores [R][32] of R keys.
template <int R>
static void score_keys(const float *const *keys, const float *queries, Word stride, Word width, float *scores) {
  vf sum[R][lane_vectors] = {};
  outer<R>(sum, [keys](int r, Word i) { return keys[r][i]; }, queries, stride, width);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < lane_vectors; v++) store(scores + r * stride + v * lanes, sum[r][v]);
}

// R features of the sums: acc [R][32] = acc * kept + over keys: value * share.
template <int R>
static void mix_values(const float *values, Word wide, const float *shares, Word stride, Word keys, const float *kept, float *acc) {
  vf sum[R][lane_vectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < lane_vectors; v++) sum[r][v] = load<vf>(acc + r * stride + v * lanes) * load<vf>(kept + v * lanes);
  outer<R>(sum, [values, wide](int r, Word i) { return values[i * wide + r]; }, shares, stride, keys);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < lane_vectors; v++) store(acc + r * stride + v * lanes, sum[r][v]);
}

// What each place of a query holds: [places] each; features and keys are rows of places.
struct Places {
  Word count;  // a multiple of 32
  float *queries, *acc, *scores, *most, *sum, *position, *slope, *kept;
};

// Scores of `keys` keys from position j on become shares of the vector of queries at `at`, and the running maxima and sums follow.
DS_INLINE void share(const Layer &y, const Places &p, Word at, Word j, Word keys) {
  const vf before = load<vf>(p.most + at), query = load<vf>(p.position + at), slope = load<vf>(p.slope + at);
  vf most = before;
  for (Word i = 0; i < keys; i++) {
    float *score = p.scores + i * p.count + at;
    const vf x = seen_score(y, load<vf>(score), splat(static_cast<float>(j + i)), query, slope);
    most = select(x > most, x, most);
    store(score, x);
  }
  const vf base = select(most == none, vf{}, most), kept = exponential(before - base);
  vf sum = load<vf>(p.sum + at) * kept;
  for (Word i = 0; i < keys; i++) {
    float *score = p.scores + i * p.count + at;
    const vf x = exponential(load<vf>(score) - base);
    sum += x;
    store(score, x);
  }
  store(p.most + at, most);
  store(p.sum + at, sum);
  store(p.kept + at, kept);
}

static void many_queries(const Step &s, const Layer &y, const Attend &a, Word h, float *scratch) {
  const Word group = y.heads / y.kv_heads, queries = a.rows * group, width = y.width, wide = y.value_width;
  const Word first = first_of(a), last = first + a.rows - 1, count = (queries + 31) / 32 * 32;
  float *key_rows = scratch, *value_rows = key_rows + many_keys * width, *next = value_rows + many_keys * wide;
  const auto take = [&next, count](Word rows) {
    float *here = next;
    next += rows * count;
    return here;
  };
  const Places p = {count, take(width), take(wide), take(many_keys), take(1), take(1), take(1), take(1), take(1)};
  std::memset(p.queries, 0, static_cast<std::size_t>(count * (width + wide)) * 4);
  for (Word q = 0; q < count; q++) {
    const Word head = h * group + q % group;
    const bool is = q < queries;
    p.most[q] = is && y.sinks ? y.sinks[head] : none;
    p.sum[q] = is && y.sinks ? 1.0f : 0.0f;
    p.position[q] = is ? static_cast<float>(first + q / group) : -1.0f;
    p.slope[q] = is && y.slopes ? y.slopes[head] : 0.0f;
    if (!is) continue;
    const float *x = a.qkv + (a.row + q / group) * a.qkv_stride + head * width;
    for (Word w = 0; w < width; w++) p.queries[w * count + q] = x[w];
  }
  for (Word j = first_key(y, first); j <= last; j += many_keys) {
    const Word keys = last + 1 - j < many_keys ? last + 1 - j : many_keys;
    const float *k[many_keys];
    for (Word i = 0; i < keys; i++) {
      const Word at = kept_at(s, y, a, h, j + i);
      k[i] = kept_row(s.kept, y.keys, y.key_scales, at, width, key_rows + i * width);
      float *to = value_rows + i * wide;
      const float *v = y.latent ? k[i] : kept_row(s.kept, y.values, y.value_scales, at, wide, to);
      if (v != to) std::memcpy(to, v, static_cast<std::size_t>(wide) * 4);
    }
    for (Word at = 0; at < count; at += 32) {
      const Word furthest = (at + 31 < queries ? at + 31 : queries - 1) / group + first;
      if (furthest < j) continue;  // the first queries of the tile see none of these
      Word i = 0;
      for (; i + tile <= keys; i += tile)
        score_keys<tile>(k + i, p.queries + at, count, width, p.scores + i * count + at);
      for (; i < keys; i++) score_keys<1>(k + i, p.queries + at, count, width, p.scores + i * count + at);
      for (int v = 0; v < lane_vectors; v++) share(y, p, at + v * lanes, j, keys);
      Word w = 0;
      for (; w + tile <= wide; w += tile)
        mix_values<tile>(value_rows + w, wide, p.scores + at, count, keys, p.kept + at, p.acc + w * count + at);
      for (; w < wide; w++)
        mix_values<1>(value_rows + w, wide, p.scores + at, count, keys, p.kept + at, p.acc + w * count + at);
    }
  }
  for (Word q = 0; q < queries; q++) {
    float *out = a.out + (a.row + q / group) * a.out_stride + (h * group + q % group) * wide;
    const float by = 1.0f / p.sum[q];
    for (Word w = 0; w < wide; w++) out[w] = p.acc[w * count + q] * by;
  }
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

void decoder_place(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row, std::int64_t from,
                   std::int64_t to, float *qkv) {
  const Word position = c.start + row - c.first;
  const Word slot = c.blocks[position / s.block_size] * s.block_size + position % s.block_size;
  float *keys = qkv + y.heads * y.width, *values = keys + y.kv_heads * y.width;
  if (y.query_norm.weight && y.whole) {
    norm_row(y.query_norm, qkv, y.heads * y.width, qkv);
    norm_row(y.key_norm, keys, y.kv_heads * y.width, keys);
  }
  const Word turns = y.rope < 0 ? 0 : (y.rope * s.rows + row) * s.rope_stride;
  const Word group = y.heads / y.kv_heads;
  const auto clip = [&](float *x, Word n) {
    const float most = static_cast<float>(y.clip);
    for (Word i = 0; i < n; i++) x[i] = x[i] > most ? most : x[i] < -most ? -most : x[i];
  };
  const auto turn = [&](Normed n, float *x, Word h) {
    if (y.norm_each && n.weight) n.weight += h * y.width;
    const bool normed = n.weight && !y.whole;
    if (y.clip != 0.0) clip(x, y.width);
    if (normed && !y.norm_late) norm_row(n, x, y.width, x);
    if (y.rope >= 0) rotate(y, s.cos + turns, s.sin + turns, x);
    if (normed && y.norm_late) norm_row(n, x, y.width, x);
  };
  for (Word h = from * group; h < to * group; h++) turn(y.query_norm, qkv + h * y.width, h);
  for (Word h = from; h < to; h++) {
    turn(y.key_norm, keys + h * y.width, h);
    if (y.clip != 0.0) clip(values + h * y.value_width, y.value_width);
    keep(s.kept, y.keys, y.key_scales, slot * y.kv_heads + h, y.width, keys + h * y.width);
    keep(s.kept, y.values, y.value_scales, slot * y.kv_heads + h, y.value_width, values + h * y.value_width);
  }
}

void decoder_place_latent(const decoder::Step &s, const decoder::Layer &y, const decoder::Chunk &c, std::int64_t row, float *kv,
                          float *queries) {
  const Latent &l = *y.latent;
  const Word position = c.start + row - c.first;
  const Word slot = c.blocks[position / s.block_size] * s.block_size + position % s.block_size;
  const Word turns = y.rope < 0 ? 0 : (y.rope * s.rows + row) * s.rope_stride;
  norm_row(l.norm, kv, l.rank, kv);
  if (y.rope >= 0) {
    rotate(y, s.cos + turns, s.sin + turns, kv + l.rank);
    for (Word h = 0; h < y.heads; h++) rotate(y, s.cos + turns, s.sin + turns, queries + h * (l.plain + l.rotated) + l.plain);
  }
  keep(s.kept, y.keys, nullptr, slot, l.rank + l.rotated, kv);
}

void decoder_attend(const decoder::Step &s, const decoder::Layer &y, const decoder::Attend &a, float *scratch) {
  if (a.rows * (y.heads / y.kv_heads) <= few_queries) return each_query(s, y, a, scratch);
  for (Word h = a.kv_head; h < a.kv_head + a.kv_heads; h++) many_queries(s, y, a, h, scratch);
}

std::int64_t attend_floats(const decoder::Layer &y) {
  const Word group = y.heads / y.kv_heads, most = group > decoder::queries ? group : decoder::queries;
  const Word places = (most + 31) / 32 * 32;
  const Word one = few_keys * (y.width + y.value_width) + 2 * few_queries * y.kv_heads;
  const Word all = many_keys * (y.width + y.value_width) + places * (y.width + y.value_width + many_keys + 5);
  return one > all ? one : all;
}

}  // namespace ds::DS_ISA
