#include <ds/rows.h>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {

namespace {

bool inside(const std::int64_t *index, std::int64_t n, std::int64_t per, std::int64_t rows) {
  std::uint64_t most = 0;  // as unsigned: a negative one is the largest
  for (std::int64_t i = 0; i < n; i++) most = static_cast<std::uint64_t>(index[i]) > most ? static_cast<std::uint64_t>(index[i]) : most;
  return n == 0 || (rows > 0 && most / static_cast<std::uint64_t>(per) < static_cast<std::uint64_t>(rows));
}

// Calls f(begin, end) for parts of `n` rows of so many bytes.
template <class F>
void split_rows(std::int64_t n, std::int64_t bytes, int threads, const F &f) {
  on_threads(useful_threads(n * bytes / 4, threads), [&](int i, int parts) {
    const Range r = part_of(n, 1, i, parts);
    if (r.begin < r.end) f(r.begin, r.end);
  });
}

}  // namespace

Status gather_rows(void *out, const void *x, std::int64_t rows, std::int64_t row_bytes, const std::int64_t *index, std::int64_t n,
                   std::int64_t per, int threads) {
  if (n < 0 || per < 1 || rows < 0 || row_bytes < 0 || (n > 0 && !index)) return Status::bad_argument;
  if (!inside(index, n, per, rows)) return Status::bad_argument;
  if (n == 0 || row_bytes == 0) return Status::ok;
  if (!out || !x) return Status::bad_argument;
  const bool streaming = n * row_bytes >= past_cache_bytes;
  split_rows(n, row_bytes, threads, [&](std::int64_t begin, std::int64_t end) {
    kernels().gather_rows(out, x, row_bytes, index, per, begin, end, streaming);
    if (streaming) end_of_streaming();
  });
  return Status::ok;
}

Status sum_rows(void *out, const void *x, Dtype dtype, std::int64_t rows, std::int64_t cols, const std::int64_t *index,
                const float *weights, std::int64_t n, std::int64_t each, int threads) {
  if (n < 0 || each < 0 || rows < 0 || cols < 0 || (n > 0 && each > 0 && !index)) return Status::bad_argument;
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16) return Status::bad_dtype;
  if (!inside(index, n * each, 1, rows)) return Status::bad_argument;
  if (n == 0 || cols == 0) return Status::ok;
  if (!out || (each > 0 && !x)) return Status::bad_argument;
  split_rows(n, cols * size_of(dtype) * (each + 1), threads, [&](std::int64_t begin, std::int64_t end) {
    kernels().sum_rows(out, x, dtype, cols, index, weights, each, begin, end);
  });
  return Status::ok;
}

}  // namespace ds
