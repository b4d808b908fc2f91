// RMS norm and its gradient. Rows whose elements move four at a time stay in registers between the two passes: a team of 32 to
// 256 threads takes a row, so that a thread has at most `held` quads of it. Any other row: one block, two reads.
// Gradients: a block takes a run of rows, so that a column's weight gradient has one writer.
#include <initializer_list>

#include "cuda.h"

namespace ds::cuda {
namespace {

constexpr int held = 8;                                      // quads of a row that one thread keeps
constexpr std::int64_t longest = 4 * held * block_threads;  // elements of a row that is kept

// Elements [i, i + 4), which lie as `D` at an address that is a multiple of all four.
template <Dtype D>
DS_FN Quad whole_quad(const void *p, std::int64_t i) {
  Quad q;
  if (D == Dtype::f32) {
    const Words w = *reinterpret_cast<const Words *>(static_cast<const float *>(p) + i);
    for (int k = 0; k < 4; k++) q.v[k] = w.v[k];
  } else {
    const Halves h = *reinterpret_cast<const Halves *>(static_cast<const std::uint16_t *>(p) + i);
    for (int k = 0; k < 4; k++) q.v[k] = D == Dtype::bf16 ? bf16_to_f32(h.v[k]) : f16_to_f32(h.v[k]);
  }
  return q;
}
template <Dtype D>
DS_FN void store_whole(void *p, std::int64_t i, const Quad &q) {
  if (D == Dtype::f32) {
    *reinterpret_cast<Words *>(static_cast<float *>(p) + i) = {{q.v[0], q.v[1], q.v[2], q.v[3]}};
  } else {
    Halves h;
    for (int k = 0; k < 4; k++) h.v[k] = D == Dtype::bf16 ? f32_to_bf16(q.v[k]) : f32_to_f16(q.v[k]);
    *reinterpret_cast<Halves *>(static_cast<std::uint16_t *>(p) + i) = h;
  }
}

// The sum over the `T` threads that share a row, in each of them. All threads of the block come here.
template <int T>
DS_FN double team_sum(double x, double *shared) {
  x = warp_sum(x);
  if (T == warp_threads) return x;
  const int warp = static_cast<int>(threadIdx.x) / warp_threads, team_warps = T / warp_threads;
  if (static_cast<int>(threadIdx.x) % warp_threads == 0) shared[warp] = x;
  __syncthreads();
  x = 0.0;
  for (int w = 0; w < team_warps; w++) x += shared[warp / team_warps * team_warps + w];
  __syncthreads();
  return x;
}

template <Dtype D, int T>
DS_KERNEL void held_norm_kernel(Norm n) {
  DS_SHARED double shared[block_warps];
  const int mine = static_cast<int>(threadIdx.x) % T, cols = static_cast<int>(n.cols);
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(block_threads / T) + static_cast<int>(threadIdx.x) / T;
  const bool there = row < n.rows;  // whoever has no row still comes to the barriers
  const std::int64_t first = row * n.cols;
  Quad x[held];
  double sum = 0.0;
  DS_UNROLL
  for (int j = 0; j < held; j++) {
    const int i = 4 * (mine + j * T);
    if (there && i < cols) x[j] = whole_quad<D>(n.x, first + i);
  }
  if (n.residual) {
    DS_UNROLL
    for (int j = 0; j < held; j++) {
      const int i = 4 * (mine + j * T);
      if (!there || i >= cols) continue;
      const Quad r = whole_quad<D>(n.residual, first + i);
      for (int k = 0; k < 4; k++) x[j].v[k] = rounded(x[j].v[k] + r.v[k], D);
      store_whole<D>(n.sum, first + i, x[j]);
    }
  }
  DS_UNROLL
  for (int j = 0; j < held; j++) {
    if (!there || 4 * (mine + j * T) >= cols) continue;
    float squares = 0.0f;
    for (int k = 0; k < 4; k++) squares += x[j].v[k] * x[j].v[k];
    sum += squares;
  }
  sum = team_sum<T>(sum, shared);
  const float rstd = static_cast<float>(1.0 / sqrt(sum / static_cast<double>(n.cols) + n.eps));
  if (!there) return;
  if (mine == 0) n.rstd[row] = rstd;
  DS_UNROLL
  for (int j = 0; j < held; j++) {
    const int i = 4 * (mine + j * T);
    if (i >= cols) continue;
    Quad w = {{1.0f, 1.0f, 1.0f, 1.0f}};
    if (n.weight) w = whole_quad<Dtype::f32>(n.weight, i);
    for (int k = 0; k < 4; k++) x[j].v[k] = x[j].v[k] * rstd * w.v[k];
    store_whole<D>(n.y, first + i, x[j]);
  }
}

// A block's teams take its rows in turn. Each keeps the weight gradient of its columns in registers; at the end teams add up theirs.
template <Dtype D, int T>
DS_KERNEL void held_norm_grad_kernel(NormGrad n, std::int64_t rows_per_block) {
  constexpr int teams = block_threads / T;
  DS_SHARED double shared[block_warps];
  DS_SHARED float added[teams > 1 ? 4 * held * T : 1];
  const int mine = static_cast<int>(threadIdx.x) % T, team = static_cast<int>(threadIdx.x) / T;
  const int cols = static_cast<int>(n.cols);
  const std::int64_t begin = blockIdx.x * rows_per_block;
  const std::int64_t end = n.rows - begin < rows_per_block ? n.rows : begin + rows_per_block;
  Quad dweight[held];
  DS_UNROLL
  for (int j = 0; j < held; j++) dweight[j] = Quad{{0.0f, 0.0f, 0.0f, 0.0f}};
  for (std::int64_t row = begin + team; row - team < end; row += teams) {
    const bool there = row < end;
    const std::int64_t first = row * n.cols;
    const float rstd = there ? n.rstd[row] : 0.0f;
    Quad g[held], xhat[held];
    double dot = 0.0;
    DS_UNROLL
    for (int j = 0; j < held; j++) {
      const int i = 4 * (mine + j * T);
      if (!there || i >= cols) continue;
      g[j] = whole_quad<D>(n.dy, first + i);
      xhat[j] = whole_quad<D>(n.h, first + i);
    }
    DS_UNROLL
    for (int j = 0; j < held; j++) {
      const int i = 4 * (mine + j * T);
      if (!there || i >= cols) continue;
      Quad w = {{1.0f, 1.0f, 1.0f, 1.0f}};
      if (n.weight) w = whole_quad<Dtype::f32>(n.weight, i);
      float part = 0.0f;
      for (int k = 0; k < 4; k++) {
        xhat[j].v[k] = xhat[j].v[k] * rstd;
        dweight[j].v[k] += g[j].v[k] * xhat[j].v[k];
        g[j].v[k] = g[j].v[k] * w.v[k];
        part += g[j].v[k] * xhat[j].v[k];
      }
      dot += part;
    }
    const float along = static_cast<float>(team_sum<T>(dot, shared) / static_cast<double>(n.cols));
    DS_UNROLL
    for (int j = 0; j < held; j++) {
      const int i = 4 * (mine + j * T);
      if (!there || i >= cols) continue;
      for (int k = 0; k < 4; k++) g[j].v[k] = (g[j].v[k] - xhat[j].v[k] * along) * rstd;
      if (n.dsum) {
        const Quad other = whole_quad<D>(n.dsum, first + i);
        for (int k = 0; k < 4; k++) g[j].v[k] += other.v[k];
      }
      store_whole<D>(n.dx, first + i, g[j]);
    }
  }
  if (!n.dweight) return;
  float *out = n.dweight + blockIdx.x * n.cols;
  for (int from = 0; from < teams; from++) {
    if (from > 0) __syncthreads();
    if (team != from) continue;
    DS_UNROLL
    for (int j = 0; j < held; j++) {
      const int i = 4 * (mine + j * T);
      if (i >= cols) continue;
      for (int k = 0; k < 4; k++) {
        const float sum = from == 0 ? dweight[j].v[k] : added[i + k] + dweight[j].v[k];
        if (from == teams - 1)
          out[i + k] = sum;
        else
          added[i + k] = sum;
      }
    }
  }
}

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

bool whole(std::int64_t cols, Dtype dtype, std::initializer_list<const void *> elements, const void *weight) {
  if (cols % 4 != 0 || cols > longest) return false;
  const std::uintptr_t bytes = dtype == Dtype::f32 ? 16 : 8;
  for (const void *p : elements)
    if (reinterpret_cast<std::uintptr_t>(p) % bytes != 0) return false;
  return reinterpret_cast<std::uintptr_t>(weight) % 16 == 0;
}

template <Dtype D, int T>
Status held_norm(const Norm &n, Stream stream) {
  if (T < block_threads && n.cols > 4 * held * T) return held_norm<D, T < block_threads ? 2 * T : T>(n, stream);
  constexpr std::int64_t teams = block_threads / T;
  return launch(held_norm_kernel<D, T>, (n.rows + teams - 1) / teams, stream, n);
}

template <Dtype D, int T>
Status held_norm_grad(const NormGrad &n, std::int64_t per_block, Stream stream) {
  if (T < block_threads && n.cols > 4 * held * T)
    return held_norm_grad<D, T < block_threads ? 2 * T : T>(n, per_block, stream);
  return launch(held_norm_grad_kernel<D, T>, (n.rows + per_block - 1) / per_block, stream, n, per_block);
}

}  // namespace

Status norm(const Norm &n, Stream stream) {
  if (n.rows < 0 || n.cols < 0) return Status::bad_argument;
  if (n.rows == 0 || n.cols == 0) return Status::ok;
  if (!n.x || !n.y || !n.rstd || (n.residual && !n.sum)) return Status::bad_argument;
  if (!whole(n.cols, n.dtype, {n.x, n.residual, n.sum, n.y}, n.weight)) return launch(norm_kernel, n.rows, stream, n);
  switch (n.dtype) {
    case Dtype::f32: return held_norm<Dtype::f32, warp_threads>(n, stream);
    case Dtype::bf16: return held_norm<Dtype::bf16, warp_threads>(n, stream);
    case Dtype::f16: return held_norm<Dtype::f16, warp_threads>(n, stream);
  }
  return Status::bad_argument;
}

Status norm_grad(const NormGrad &n, Stream stream) {
  if (n.rows < 0 || n.cols < 0) return Status::bad_argument;
  if (n.rows == 0 || n.cols == 0) return Status::ok;
  if (!n.h || !n.dy || !n.dx || !n.rstd) return Status::bad_argument;
  const std::int64_t per_block = (n.rows + norm_grad_blocks - 1) / norm_grad_blocks;
  if (!whole(n.cols, n.dtype, {n.h, n.dy, n.dsum, n.dx}, n.weight))
    return launch(norm_grad_kernel, (n.rows + per_block - 1) / per_block, stream, n, per_block);
  switch (n.dtype) {
    case Dtype::f32: return held_norm_grad<Dtype::f32, warp_threads>(n, per_block, stream);
    case Dtype::bf16: return held_norm_grad<Dtype::bf16, warp_threads>(n, per_block, stream);
    case Dtype::f16: return held_norm_grad<Dtype::f16, warp_threads>(n, per_block, stream);
  }
  return Status::bad_argument;
}

}  // namespace ds::cuda
