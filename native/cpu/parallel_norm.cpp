#include <ds/norm.h>

#include "kernels/table.h"
#include "parallel.h"

namespace ds {

Status norm(const Norm &n, float *scratch, int threads) {
  if (n.rows < 0 || n.cols < 1) return n.rows == 0 || n.cols == 0 ? Status::ok : Status::bad_argument;
  if (!n.x || !n.y || !n.rstd || !scratch || (n.residual && !n.sum))
    return n.rows == 0 ? Status::ok : Status::bad_argument;
  const Kernels &k = kernels();
  on_threads(useful_threads(n.rows * n.cols, threads), [&](int i, int parts) {
    const Range r = part_of(n.rows, 1, i, parts);
    k.norm_rows(n, r.begin, r.end, scratch + i * n.cols);
  });
  return Status::ok;
}

Status norm_grad(const NormGrad &n, float *scratch, int threads) {
  if (n.rows < 0 || n.cols < 1) return n.rows == 0 || n.cols == 0 ? Status::ok : Status::bad_argument;
  if (!n.h || !n.dy || !n.dx || !n.rstd || !scratch)
    return n.rows == 0 ? Status::ok : Status::bad_argument;
  const Kernels &k = kernels();
  const std::int64_t per_block = (n.rows + norm_grad_blocks - 1) / norm_grad_blocks;
  const std::int64_t blocks = per_block ? (n.rows + per_block - 1) / per_block : 0;
  on_threads(useful_threads(n.rows * n.cols, threads), [&](int i, int parts) {
    const Range r = part_of(blocks, 1, i, parts);
    for (std::int64_t b = r.begin; b < r.end; b++) {
      const std::int64_t end = (b + 1) * per_block;
      k.norm_grad_rows(n, b * per_block, end < n.rows ? end : n.rows, b, scratch + i * 2 * n.cols);
    }
  });
  return Status::ok;
}

}  // namespace ds
