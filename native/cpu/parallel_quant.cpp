#include <ds/quant.h>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {
namespace {

bool usable(const QuantSpec &s, const QuantRows &q) {
  const QuantFormat &f = s.format;
  if (f.bits != 4 && f.bits != 6 && f.bits != 8) return false;
  if (s.group < 1 || s.group * f.bits % 8 != 0 || (!s.symmetric && f.mantissa >= 0)) return false;
  if (q.rows < 0 || q.cols < 0 || q.params_at % 4 != 0 || q.row_bytes % 4 != 0) return false;
  if (q.params_at < (q.cols * f.bits + 7) / 8) return false;
  if (q.row_bytes < q.params_at + quant_groups(s, q.cols) * quant_params(s) * 4) return false;
  return q.base || q.rows * q.cols == 0;
}

bool past_cache(std::int64_t rows, std::int64_t cols, Dtype dtype) {
  return rows * cols * size_of(dtype) >= past_cache_bytes;
}

// Calls f(row, group, first, n, thread) for every run of at most `most` groups inside a row that a thread has: elements
// [first, first + n) of the row, which start with `group`.
template <class F>
void each_run(const QuantSpec &s, std::int64_t rows, std::int64_t cols, std::int64_t most, int threads, const F &f) {
  const std::int64_t groups = quant_groups(s, cols);
  on_threads(useful_threads(rows * cols, threads), [&](int i, int parts) {
    const Range r = part_of(rows * groups, 1, i, parts);
    for (std::int64_t unit = r.begin; unit < r.end;) {
      const std::int64_t row = unit / groups, group = unit % groups, first = group * s.group;
      std::int64_t run = groups - group < r.end - unit ? groups - group : r.end - unit;
      if (run > most) run = most;
      f(row, group, first, cols - first < run * s.group ? cols - first : run * s.group, i);
      unit += run;
    }
    end_of_streaming();  // if there was any
  });
}

template <class F>
void each_group(const QuantSpec &s, std::int64_t rows, std::int64_t cols, int threads, const F &f) {
  each_run(s, rows, cols, 1, threads, f);
}

// All groups of a row that a thread has.
constexpr std::int64_t all_groups = INT64_MAX;

void write_group(const Kernels &k, const QuantSpec &s, const QuantRows &q, std::int64_t row, std::int64_t group,
                 const void *x, Dtype dtype, std::int64_t n, std::int64_t index) {
  unsigned char *base = q.base + row * q.row_bytes;
  float *params = reinterpret_cast<float *>(base + q.params_at) + group * quant_params(s);
  if (group == quant_groups(s, q.cols) - 1)  // padding is sent too, so it is not left to chance
    for (std::int64_t i = (q.cols * s.format.bits + 7) / 8; i < q.params_at; i++) base[i] = 0;
  k.quantize_group(s, base + group * s.group * s.format.bits / 8, params, x, dtype, n, index);
}

}  // namespace

Status quantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *order, const void *x, Dtype dtype,
                int threads) {
  if (!usable(s, q) || (!x && q.rows * q.cols > 0)) return Status::bad_argument;
  const Kernels &k = kernels();
  each_group(s, q.rows, q.cols, threads,
             [&](std::int64_t row, std::int64_t group, std::int64_t first, std::int64_t n, int) {
               const std::int64_t i = row * q.cols + first;
               const void *from = static_cast<const char *>(x) + i * size_of(dtype);
               write_group(k, s, q, order ? order[row] : row, group, from, dtype, n, s.offset + i);
             });
  return Status::ok;
}

Status dequantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *index, std::int64_t count, void *out,
                  Dtype dtype, int threads) {
  if (!usable(s, q) || count < 0 || (!out && count * q.cols > 0)) return Status::bad_argument;
  for (std::int64_t i = 0; i < count; i++)
    if (index ? index[i] < 0 || index[i] >= q.rows : i >= q.rows) return Status::bad_argument;
  const Kernels &k = kernels();
  const bool streaming = past_cache(count, q.cols, dtype);
  each_run(s, count, q.cols, all_groups, threads,
           [&](std::int64_t row, std::int64_t group, std::int64_t first, std::int64_t n, int) {
             const QuantSources from = {q.base + (index ? index[row] : row) * q.row_bytes, 1, 0, q.params_at, streaming};
             void *to = static_cast<char *>(out) + (row * q.cols + first) * size_of(dtype);
             k.dequantize_groups(s, from, group, 1.0f, to, dtype, n);
           });
  return Status::ok;
}

Status reduce(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, void *out, Dtype dtype,
              int threads) {
  if (!usable(s, q) || sources < 1 || q.rows % sources != 0) return Status::bad_argument;
  const std::int64_t rows = q.rows / sources;
  if (!out && rows * q.cols > 0) return Status::bad_argument;
  const Kernels &k = kernels();
  const bool streaming = past_cache(rows, q.cols, dtype);
  each_run(s, rows, q.cols, all_groups, threads,
           [&](std::int64_t row, std::int64_t group, std::int64_t first, std::int64_t n, int) {
             const QuantSources from = {q.base + row * q.row_bytes, sources, rows * q.row_bytes, q.params_at, streaming};
             void *to = static_cast<char *>(out) + (row * q.cols + first) * size_of(dtype);
             k.dequantize_groups(s, from, group, factor, to, dtype, n);
           });
  return Status::ok;
}

Status reduce_quantized(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, const QuantSpec &so,
                        const QuantRows &out, float *scratch, int threads) {
  if (!usable(s, q) || !usable(so, out) || sources < 1 || q.rows % sources != 0) return Status::bad_argument;
  if (so.group % s.group != 0 || out.cols != q.cols || out.rows != q.rows / sources || !scratch)
    return Status::bad_argument;
  const Kernels &k = kernels();
  const std::int64_t inner = so.group / s.group;
  each_group(so, out.rows, out.cols, threads,
             [&](std::int64_t row, std::int64_t group, std::int64_t first, std::int64_t n, int thread) {
               float *sum = scratch + thread * so.group;
               const QuantSources from = {q.base + row * q.row_bytes, sources, out.rows * q.row_bytes, q.params_at,
                                          false};
               k.dequantize_groups(s, from, group * inner, factor, sum, Dtype::f32, n);
               write_group(k, so, out, row, group, sum, Dtype::f32, n, so.offset + row * out.cols + first);
             });
  return Status::ok;
}

}  // namespace ds
