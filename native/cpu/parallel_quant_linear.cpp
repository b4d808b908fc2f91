#include <ds/quant_linear.h>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {

Status quant_linear(const QuantSpec &s, const QuantRows &q, std::int64_t first, std::int64_t rows, const float *x,
                    std::int64_t tokens, float *y, std::int64_t y_stride, int threads) {
  if (first < 0 || rows < 0 || first + rows > q.rows || tokens < 0 || q.cols < 0 || y_stride < rows)
    return Status::bad_argument;
  if (s.group < 1 || s.group * s.format.bits % 8 != 0 || q.params_at < (q.cols * s.format.bits + 7) / 8)
    return Status::bad_argument;
  if (rows == 0 || tokens == 0) return Status::ok;
  if (!y || (q.cols > 0 && (!x || !q.base))) return Status::bad_argument;
  const Kernels &k = kernels();
  on_threads(useful_threads(rows * q.cols, threads), [&](int i, int parts) {
    const Range part = part_of(rows, 1, i, parts);
    for (std::int64_t r = part.begin; r < part.end; r++) {
      const QuantSources row = {q.base + (first + r) * q.row_bytes, 1, 0, q.params_at, false};
      k.quant_dots(s, row, q.cols, x, tokens, y + r, y_stride);
    }
  });
  return Status::ok;
}

}  // namespace ds
