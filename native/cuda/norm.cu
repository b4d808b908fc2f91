// RMS norm: one block a row; its gradient: one block a run of rows, so that a column's weight gradient has one writer.
#include "cuda.h"

namespace ds::cuda {
namespace {

DS_KERNEL void norm_kernel(Norm n) {
  DS_SHARED double shared[block_warps + 1];
  const std::int64_t first = blockIdx.x * n.cols;
  const void *h = n.residual ? n.sum : n.x;
  double sum = 0.0;
  for (std::int64_t i = 4 * static_cast<std::int64_t>(threadIdx.x); i < n.cols; i += 4 * block_threads) {
    const int m = quad_size(i, n.cols);
    Quad x = load_quad(n.x, n.dtype, first + i, m);
    if (n.residual) {
      const Quad r = load_quad(n.residual, n.dtype, first + i, m);
      for (int k = 0; k < 4; k++) x.v[k] = rounded(x.v[k] + r.v[k], n.dtype);
      store_quad(n.sum, n.dtype, first + i, m, x);
    }
    float squares = 0.0f;
    for (int k = 0; k < 4; k++) squares += x.v[k] * x.v[k];
    sum += squares;
  }
  sum = block_sum(sum, shared);
  const float rstd = static_cast<float>(1.0 / sqrt(sum / static_cast<double>(n.cols) + n.eps));
  if (threadIdx.x == 0) n.rstd[blockIdx.x] = rstd;
  for (std::int64_t i = 4 * static_cast<std::int64_t>(threadIdx.x); i < n.cols; i += 4 * block_threads) {
    const int m = quad_size(i, n.cols);
    Quad x = load_quad(h, n.dtype, first + i, m);  // what this very thread stored, if there is a residual
    for (int k = 0; k < m; k++) x.v[k] = x.v[k] * rstd * (n.weight ? n.weight[i + k] : 1.0f);
    store_quad(n.y, n.dtype, first + i, m, x);
  }
}

DS_KERNEL void norm_grad_kernel(NormGrad n, std::int64_t rows_per_block) {
  DS_SHARED double shared[block_warps + 1];
  const std::int64_t begin = blockIdx.x * rows_per_block;
  const std::int64_t end = n.rows - begin < rows_per_block ? n.rows : begin + rows_per_block;
  float *dweight = n.dweight ? n.dweight + blockIdx.x * n.cols : nullptr;
  for (std::int64_t row = begin; row < end; row++) {
    const std::int64_t first = row * n.cols;
    const float rstd = n.rstd[row];
    double dot = 0.0;
    for (std::int64_t i = threadIdx.x; i < n.cols; i += block_threads) {
      const float dy = load(n.dy, n.dtype, first + i), xhat = load(n.h, n.dtype, first + i) * rstd;
      dot += static_cast<double>(dy * (n.weight ? n.weight[i] : 1.0f) * xhat);
      if (dweight) dweight[i] += dy * xhat;
    }
    const float along = static_cast<float>(block_sum(dot, shared) / static_cast<double>(n.cols));
    for (std::int64_t i = threadIdx.x; i < n.cols; i += block_threads) {
      const float g = load(n.dy, n.dtype, first + i) * (n.weight ? n.weight[i] : 1.0f);
      const float xhat = load(n.h, n.dtype, first + i) * rstd;
      float dx = (g - xhat * along) * rstd;
      if (n.dsum) dx += load(n.dsum, n.dtype, first + i);
      store(n.dx, n.dtype, first + i, dx);
    }
  }
}

}  // namespace

Status norm(const Norm &n, Stream stream) {
  if (n.rows < 0 || n.cols < 0) return Status::bad_argument;
  if (n.rows == 0 || n.cols == 0) return Status::ok;
  if (!n.x || !n.y || !n.rstd || (n.residual && !n.sum)) return Status::bad_argument;
  return launch(norm_kernel, n.rows, stream, n);
}

Status norm_grad(const NormGrad &n, Stream stream) {
  if (n.rows < 0 || n.cols < 0) return Status::bad_argument;
  if (n.rows == 0 || n.cols == 0) return Status::ok;
  if (!n.h || !n.dy || !n.dx || !n.rstd) return Status::bad_argument;
  const std::int64_t per_block = (n.rows + norm_grad_blocks - 1) / norm_grad_blocks;
  return launch(norm_grad_kernel, (n.rows + per_block - 1) / per_block, stream, n, per_block);
}

}  // namespace ds::cuda
