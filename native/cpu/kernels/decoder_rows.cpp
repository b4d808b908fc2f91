// Rows of inputs become panels: see panel.h.
#include "declare.h"
#include "panel.h"

namespace {

// `count` words into one row of a panel.
DS_INLINE void place(std::uint32_t *to, Word tall, const void *words, Word count) {
  if (tall == 1) {
    std::memcpy(to, words, static_cast<std::size_t>(count) * 4);
    return;
  }
  const std::uint32_t *from = static_cast<const std::uint32_t *>(words);
  for (Word i = 0; i < count; i++) to[i * tall] = from[i];
}

DS_INLINE float most_of(vf x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int l = 1; l < lanes; l++) most = x[l] > most ? x[l] : most;
  return most;
#endif
}

DS_INLINE float sum_of(vf x) {
#if defined(__AVX512F__) && DS_LANES == 16
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0.0f;
  for (int l = 0; l < lanes; l++) sum += x[l];
  return sum;
#endif
}

// Calls f(first, values, how many of them count) over [begin, end), a multiple of 8 long.
template <class F>
DS_INLINE void each(const float *x, Word begin, Word end, const F &f) {
  each_vector(
      end - begin, [&](Word i) { f(begin + i, load<vf>(x + begin + i), Word{lanes}); },
      [&](Word i, Word left) { f(begin + i, load_part<vf>(x + begin + i, left), left); });
}

// Inputs of each group become codes of -127 to 127 times the group's scale; ties go to even.
static void round_to_bytes(const Matrix &m, bool dots, const float *x, std::uint32_t *to, Word tall) {
  const Word groups = groups_of(m);
  float *after = reinterpret_cast<float *>(to + words_of(m, dots) * tall);
  float *sums = dots ? after + groups * tall : after;
  for (Word g = 0; g < groups; g++) {
    const Word begin = g * m.group, end = begin + m.group < m.k ? begin + m.group : m.k;
    vf most = {}, sum = {};
    each(x, begin, end, [&](Word, vf v, Word) { most = select(abs(v) > most, abs(v), most); });
    const float largest = most_of(most), scale = largest > 0.0f ? largest / 127.0f : 1.0f, inverse = 1.0f / scale;
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is below 1 is rounded off
    each(x, begin, end, [&](Word i, vf v, Word count) {
      const vf code = (v * inverse + magic) - magic;
      sum += code;
      if (dots) {
        const vb bytes = __builtin_convertvector(__builtin_convertvector(code, vi), vb);
        place(to + i / 4 * tall, tall, &bytes, count / 4);
      } else {
        const vf number = code * scale;
        place(to + i * tall, tall, &number, count);
      }
    });
    if (dots) after[g * tall] = scale;
    sums[g * tall] = dots ? sum_of(sum) : sum_of(sum) * scale;
  }
}

}  // namespace

namespace ds::DS_ISA {

std::int64_t panel_bytes(const decoder::Matrix &m, std::int64_t tall) {
  const Word words = words_of(m, has_dots(m)) + 2 * groups_of(m);
  return (words * tall * 4 + 63) / 64 * 64 + 64;  // not a power of two: panels lie in different sets of the cache
}

void panel_row(const decoder::Matrix &m, const float *x, void *panel, std::int64_t tall, std::int64_t row) {
  const bool dots = has_dots(m);
  std::uint32_t *to = static_cast<std::uint32_t *>(panel) + row;
  if (m.inputs == Inputs::int8) return round_to_bytes(m, dots, x, to, tall);
  each(x, 0, m.k, [&](Word i, vf v, Word count) {
    if (m.inputs == Inputs::f32) {
      place(to + i * tall, tall, &v, count);
      return;
    }
    const vh pairs = f32_to_bf16(v);
    const vf number = bf16_to_f32(pairs);
    if (dots)
      place(to + i / 2 * tall, tall, &pairs, count / 2);
    else
      place(to + i * tall, tall, &number, count);
  });
  float *sums = reinterpret_cast<float *>(to + m.k * tall);
  for (Word g = 0; g < groups_of(m); g++) {
    const Word end = (g + 1) * m.group < m.k ? (g + 1) * m.group : m.k;
    vf sum = {};
    each(x, g * m.group, end, [&](Word, vf v, Word) { sum += v; });
    sums[g * tall] = sum_of(sum);
  }
}

}  // namespace ds::DS_ISA
