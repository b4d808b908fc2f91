// Rows picked by number: see ds/rows.h. Rows are short and anywhere, and often in another core's cache: those of the next numbers are
// asked for while one is at work.
#include "declare.h"
#include "staging.h"

namespace {

constexpr std::int64_t rows_ahead = 2, sums_ahead = 4, terms = 16;

DS_INLINE void ask(const char *p, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

template <bool Streaming>
DS_INLINE void copy_row(char *to, const char *from, std::int64_t bytes) {
  std::int64_t i = 0;
  constexpr std::int64_t step = lanes * 4;
  for (; i + step <= bytes; i += step) {
    const vf v = load<vf>(from + i);
    if (Streaming)
      stream(reinterpret_cast<float *>(to + i), v);
    else
      store(to + i, v);
  }
  if (i < bytes) std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

// One vector of a row as fp32; `left` of its lanes exist.
DS_INLINE vf number(const void *row, Dtype d, std::int64_t i, std::int64_t left) {
  if (d == Dtype::f32) {
    const float *p = static_cast<const float *>(row) + i;
    return left == lanes ? load<vf>(p) : load_part<vf>(p, left);
  }
  const std::uint16_t *p = static_cast<const std::uint16_t *>(row) + i;
  const vh v = left == lanes ? load<vh>(p) : load_part<vh>(p, left);
  return d == Dtype::bf16 ? bf16_to_f32(v) : f16_to_f32(v);
}

template <Dtype D>
static void sum(void *out, const void *x, std::int64_t cols, const std::int64_t *index, const float *weights, std::int64_t each,
                std::int64_t begin, std::int64_t end) {
  const std::int64_t size = ds::size_of(D);
  const auto row = [&](std::int64_t number) { return static_cast<const char *>(x) + index[number] * cols * size; };
  for (std::int64_t r = begin; r < end; r++) {
    if (r + sums_ahead < end)
      for (std::int64_t c = 0; c < each; c++) ask(row((r + sums_ahead) * each + c), cols * size);
    const char *first[terms];  // the addresses of the first rows of the sum
    for (std::int64_t c = 0; c < each && c < terms; c++) first[c] = row(r * each + c);
    const auto one = [&](std::int64_t i, std::int64_t left) {
      vf all = {};
      for (std::int64_t c = 0; c < each; c++)
        all = fma(weights ? weights[r * each + c] : 1.0f, number(c < terms ? first[c] : row(r * each + c), D, i, left), all);
      void *to = at(out, D, r * cols + i);
      if (D == Dtype::f32)
        store_part(static_cast<float *>(to), all, left);
      else
        store_part(static_cast<std::uint16_t *>(to), D == Dtype::bf16 ? f32_to_bf16(all) : f32_to_f16(all), left);
    };
    each_vector(cols, [&](std::int64_t i) { one(i, lanes); }, [&](std::int64_t i, std::int64_t left) { one(i, left); });
  }
}

}  // namespace

namespace ds::DS_ISA {

void gather_rows(void *out, const void *x, std::int64_t bytes, const std::int64_t *index, std::int64_t per, std::int64_t begin,
                 std::int64_t end, bool streaming) {
  const auto row = [&](std::int64_t i) { return static_cast<const char *>(x) + index[i] / per * bytes; };
  char *to = static_cast<char *>(out);
  const bool whole = streaming && bytes % 64 == 0 && reinterpret_cast<std::intptr_t>(out) % 64 == 0;
  for (std::int64_t i = begin; i < end; i++) {
    if (i + rows_ahead < end) ask(row(i + rows_ahead), bytes);
    if (whole)
      copy_row<true>(to + i * bytes, row(i), bytes);
    else
      copy_row<false>(to + i * bytes, row(i), bytes);
  }
}

void sum_rows(void *out, const void *x, Dtype dtype, std::int64_t cols, const std::int64_t *index, const float *weights,
              std::int64_t each, std::int64_t begin, std::int64_t end) {
  if (dtype == Dtype::f32) sum<Dtype::f32>(out, x, cols, index, weights, each, begin, end);
  if (dtype == Dtype::bf16) sum<Dtype::bf16>(out, x, cols, index, weights, each, begin, end);
  if (dtype == Dtype::f16) sum<Dtype::f16>(out, x, cols, index, weights, each, begin, end);
}

}  // namespace ds::DS_ISA
