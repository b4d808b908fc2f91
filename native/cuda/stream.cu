// Passes over one flat range: sum of squares, conversion, fill.
#include "cuda.h"

namespace ds::cuda {
namespace {

// Elements that one block converts or fills.
constexpr std::int64_t chunk = 8192;

DS_KERNEL void sum_squares_kernel(const void *x, Dtype dtype, std::int64_t n, double *partials) {
  DS_SHARED double shared[block_warps + 1];
  double sum = 0.0;
  const std::int64_t stride = 4 * block_threads * sum_blocks;  // more than n where fewer blocks run
  for (std::int64_t i = 4 * (blockIdx.x * static_cast<std::int64_t>(block_threads) + threadIdx.x); i < n; i += stride) {
    const Quad q = load_quad(x, dtype, i, quad_size(i, n));
    for (int k = 0; k < 4; k++) sum += static_cast<double>(q.v[k]) * static_cast<double>(q.v[k]);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

DS_KERNEL void convert_kernel(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale) {
  const std::int64_t begin = blockIdx.x * chunk, end = n - begin < chunk ? n : begin + chunk;
  for (std::int64_t i = begin + 4 * static_cast<std::int64_t>(threadIdx.x); i < end; i += 4 * block_threads) {
    Quad q = load_quad(src, sd, i, quad_size(i, end));
    for (int k = 0; k < 4; k++) q.v[k] *= scale;
    store_quad(dst, dd, i, quad_size(i, end), q);
  }
}

DS_KERNEL void fill_kernel(void *dst, Dtype dtype, std::int64_t n, float value) {
  const std::int64_t begin = blockIdx.x * chunk, end = n - begin < chunk ? n : begin + chunk;
  for (std::int64_t i = begin + 4 * static_cast<std::int64_t>(threadIdx.x); i < end; i += 4 * block_threads)
    store_quad(dst, dtype, i, quad_size(i, end), Quad{{value, value, value, value}});
}

}  // namespace

Status sum_squares(const void *x, Dtype dtype, std::int64_t n, double *partials, Stream stream) {
  if (n < 0 || !partials || (n > 0 && !x)) return Status::bad_argument;
  const std::int64_t useful = (n + 4 * block_threads - 1) / (4 * block_threads);
  return launch(sum_squares_kernel, useful < sum_blocks ? useful : sum_blocks, stream, x, dtype, n, partials);
}

Status convert(void *dst, Dtype dd, const void *src, Dtype sd, std::int64_t n, float scale, Stream stream) {
  if (n < 0 || (n > 0 && (!dst || !src))) return Status::bad_argument;
  if (n > 0 && dst == src && size_of(dd) != size_of(sd)) return Status::bad_argument;
  return launch(convert_kernel, (n + chunk - 1) / chunk, stream, dst, dd, src, sd, n, scale);
}

Status fill(void *dst, Dtype dtype, std::int64_t n, float value, Stream stream) {
  if (n < 0 || (n > 0 && !dst)) return Status::bad_argument;
  return launch(fill_kernel, (n + chunk - 1) / chunk, stream, dst, dtype, n, value);
}

}  // namespace ds::cuda
