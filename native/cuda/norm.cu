// RMS norm and layer norm over rows, also of a sum with a residual, and their gradients. A team of 32 to 512 threads takes a row and keeps
// it in registers as it lies in memory, 16 bytes at a time, between the passes. Rows that do not move so: `any`, one block and two reads.
// Statistics are fp32: a thread adds up at most 64 elements, then the team in pairs.
#include "device.h"

namespace ds::cuda {

// x, residual, sum, y [rows, cols]; weight, bias [cols]; mean, rstd fp32 [rows]. Null where absent (mean: RMS norm).
struct NormCall {
  const void *x, *residual, *weight, *bias;
  void *sum, *y;
  float *mean, *rstd;
  std::int64_t rows, cols;
  float eps, inverse;  // inverse: 1 / cols
  std::int32_t dtype, weight_dtype;
};
// h: what was normalized; dsum: the gradient that reached it by another way. dweight, dbias: fp32 [blocks, cols], a block's rows each.
struct NormGradCall {
  const void *h, *dy, *dsum, *weight;
  const float *mean, *rstd;
  void *dx;
  float *dweight, *dbias;
  std::int64_t rows, cols, rows_per_block;
  float inverse;
  std::int32_t dtype, weight_dtype;
};

struct Pair {
  float a, b;
};
DS_FN Pair operator+(const Pair &x, const Pair &y) { return {x.a + y.a, x.b + y.b}; }
DS_FN Pair &operator+=(Pair &x, const Pair &y) { return x = x + y; }
DS_FN Pair exchange(unsigned others, const Pair &x, int k) {
  return {exchange(others, x.a, k), exchange(others, x.b, k)};
}

// Weights of the elements [i, i + count) of a row, where the weight's type is W.
template <Dtype D, Dtype W>
DS_FN void load_weights(const void *p, int vector, float *out) {
  constexpr int count = Lanes<D>::count, parts = count / Lanes<W>::count;
  if constexpr (parts >= 1) {
    DS_UNROLL
    for (int j = 0; j < parts; j++) {
      const Words w = load_words(p, vector * parts + j);
      DS_UNROLL
      for (int k = 0; k < Lanes<W>::count; k++) out[j * Lanes<W>::count + k] = element<W>(w, k);
    }
  } else {  // fp32 elements, weights of 16 bits
    const HalfWords h = static_cast<const HalfWords *>(p)[vector];
    DS_UNROLL
    for (int k = 0; k < count; k++) out[k] = k % 2 ? high_of<W>(h.w[k / 2]) : low_of<W>(h.w[k / 2]);
  }
}

// y = (x - mean) * rstd * weight + bias. Team: threads a row; Held: 16-byte pieces of it a thread; Centre: layer norm.
template <Dtype D, Dtype W, int Team, int Held, bool Centre, bool Residual>
DS_FN void norm(const NormCall &a) {
  constexpr int count = Lanes<D>::count, block = Team < 256 ? 256 : Team;
  DS_SHARED float shared[block / warp_threads];
  const int mine = thread_index() % Team, vectors = static_cast<int>(a.cols) / count;
  const std::int64_t row = block_index() * (block / Team) + thread_index() / Team;
  const bool there = row < a.rows;  // whoever has no row still comes to the barriers
  const std::int64_t first = row * vectors;
  Words x[Held];
  DS_UNROLL
  for (int j = 0; j < Held; j++)
    if (there && mine + j * Team < vectors) x[j] = load_words(a.x, first + mine + j * Team);
  if (Residual) {
    Words r[Held];
    DS_UNROLL
    for (int j = 0; j < Held; j++)
      if (there && mine + j * Team < vectors) r[j] = load_words(a.residual, first + mine + j * Team);
    DS_UNROLL
    for (int j = 0; j < Held; j++) {
      if (!there || mine + j * Team >= vectors) continue;
      float sum[count];
      DS_UNROLL
      for (int k = 0; k < count; k++) sum[k] = element<D>(x[j], k) + element<D>(r[j], k);
      x[j] = words_of<D>(sum);
      store_words(a.sum, first + mine + j * Team, x[j]);
    }
  }
  float mean = 0.0f;
  if (Centre) {
    float sum = 0.0f;
    DS_UNROLL
    for (int j = 0; j < Held; j++) {
      if (!there || mine + j * Team >= vectors) continue;
      DS_UNROLL
      for (int k = 0; k < count; k++) sum += element<D>(x[j], k);
    }
    mean = team_sum<Team>(sum, shared) * a.inverse;
  }
  float squares = 0.0f;
  DS_UNROLL
  for (int j = 0; j < Held; j++) {
    if (!there || mine + j * Team >= vectors) continue;
    DS_UNROLL
    for (int k = 0; k < count; k++) {
      const float d = Centre ? element<D>(x[j], k) - mean : element<D>(x[j], k);
      squares = fmaf(d, d, squares);
    }
  }
  squares = team_sum<Team>(squares, shared);
  if (!there) return;
  const float rstd = 1.0f / sqrtf(squares * a.inverse + a.eps);
  if (mine == 0) {
    a.rstd[row] = rstd;
    if (Centre) a.mean[row] = mean;
  }
  DS_UNROLL
  for (int j = 0; j < Held; j++) {
    if (mine + j * Team >= vectors) continue;
    float y[count], w[count];
    DS_UNROLL
    for (int k = 0; k < count; k++) y[k] = (Centre ? element<D>(x[j], k) - mean : element<D>(x[j], k)) * rstd;
    if (a.weight) {
      load_weights<D, W>(a.weight, mine + j * Team, w);
      DS_UNROLL
      for (int k = 0; k < count; k++) y[k] *= w[k];
    }
    if (Centre && a.bias) {
      load_weights<D, W>(a.bias, mine + j * Team, w);
      DS_UNROLL
      for (int k = 0; k < count; k++) y[k] += w[k];
    }
    store_words(a.y, first + mine + j * Team, words_of<D>(y));
  }
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum with g = dy * weight; without mean(g) for RMS norm. A block's teams take its
// rows in turn, the next row on its way while one is summed; each thread keeps the weights' gradients of its columns.
template <Dtype D, Dtype W, int Team, int Held, bool Centre, bool Sum>
DS_FN void norm_grad(const NormGradCall &a) {
  constexpr int count = Lanes<D>::count, block = Team < 256 ? 256 : Team, teams = block / Team;
  constexpr bool ahead = Held <= 2;  // more pieces of two rows at once than a thread has registers for
  DS_SHARED Pair shared[block / warp_threads];
  DS_SHARED float added[teams > 1 ? count * Held * Team : 1];
  const int mine = thread_index() % Team, team = thread_index() / Team, vectors = static_cast<int>(a.cols) / count;
  const std::int64_t begin = block_index() * a.rows_per_block;
  const std::int64_t end = a.rows - begin < a.rows_per_block ? a.rows : begin + a.rows_per_block;
  float dweight[Held][count], dbias[Centre ? Held : 1][count];
  DS_UNROLL
  for (int j = 0; j < Held; j++) {
    DS_UNROLL
    for (int k = 0; k < count; k++) dweight[j][k] = 0.0f, dbias[Centre ? j : 0][k] = 0.0f;
  }
  Words g[Held], h[Held];
  std::int64_t row = begin + team;
  DS_UNROLL
  for (int j = 0; j < Held; j++) {
    if (!ahead || row >= end || mine + j * Team >= vectors) continue;
    g[j] = load_words(a.dy, row * vectors + mine + j * Team);
    h[j] = load_words(a.h, row * vectors + mine + j * Team);
  }
  for (; row - team < end; row += teams) {
    const bool there = row < end;
    const std::int64_t first = row * vectors;
    const float rstd = there ? a.rstd[row] : 0.0f, mean = Centre && there ? a.mean[row] : 0.0f;
    Pair dot = {0.0f, 0.0f};
    if constexpr (!ahead) {
      DS_UNROLL
      for (int j = 0; j < Held; j++) {
        if (!there || mine + j * Team >= vectors) continue;
        g[j] = load_words(a.dy, first + mine + j * Team);
        h[j] = load_words(a.h, first + mine + j * Team);
      }
    }
    DS_UNROLL
    for (int j = 0; j < Held; j++) {
      if (!there || mine + j * Team >= vectors) continue;
      float w[count];
      if (a.weight) load_weights<D, W>(a.weight, mine + j * Team, w);
      DS_UNROLL
      for (int k = 0; k < count; k++) {
        const float dy = element<D>(g[j], k), xhat = (Centre ? element<D>(h[j], k) - mean : element<D>(h[j], k)) * rstd;
        dweight[j][k] = fmaf(dy, xhat, dweight[j][k]);
        if (Centre) dbias[Centre ? j : 0][k] += dy;
        const float scaled = a.weight ? dy * w[k] : dy;
        dot.a = fmaf(scaled, xhat, dot.a);
        if (Centre) dot.b += scaled;
      }
    }
    Words next_g[ahead ? Held : 1], next_h[ahead ? Held : 1], other[ahead ? Held : 1];
    DS_UNROLL
    for (int j = 0; j < (ahead ? Held : 0); j++) {
      if (mine + j * Team >= vectors) continue;
      if (Sum && there) other[j] = load_words(a.dsum, first + mine + j * Team);
      if (row + teams >= end) continue;
      next_g[j] = load_words(a.dy, (row + teams) * vectors + mine + j * Team);
      next_h[j] = load_words(a.h, (row + teams) * vectors + mine + j * Team);
    }
    if (Centre)
      dot = team_sum<Team>(dot, shared);
    else
      dot.a = team_sum<Team>(dot.a, &shared[0].a);
    const float along = dot.a * a.inverse, level = Centre ? dot.b * a.inverse : 0.0f;
    DS_UNROLL
    for (int j = 0; j < Held; j++) {
      if (there && mine + j * Team < vectors) {
        float w[count], dx[count];
        if (Sum && !ahead) other[0] = load_words(a.dsum, first + mine + j * Team);
        if (a.weight) load_weights<D, W>(a.weight, mine + j * Team, w);
        DS_UNROLL
        for (int k = 0; k < count; k++) {
          const float xhat = (Centre ? element<D>(h[j], k) - mean : element<D>(h[j], k)) * rstd;
          float scaled = a.weight ? element<D>(g[j], k) * w[k] : element<D>(g[j], k);
          if (Centre) scaled -= level;
          dx[k] = fmaf(-xhat, along, scaled) * rstd;
          if (Sum) dx[k] += element<D>(other[ahead ? j : 0], k);
        }
        store_words(a.dx, first + mine + j * Team, words_of<D>(dx));
      }
      if constexpr (ahead) g[j] = next_g[j], h[j] = next_h[j];
    }
  }
  DS_UNROLL
  for (int which = 0; which < (Centre ? 2 : 1); which++) {
    float *out = which ? a.dbias : a.dweight;
    if (!out) continue;
    out += block_index() * a.cols;
    for (int from = 0; from < teams; from++) {  // teams add up theirs in turn
      if (teams > 1) __syncthreads();
      if (team != from) continue;
      DS_UNROLL
      for (int j = 0; j < Held; j++) {
        const int i = (mine + j * Team) * count;
        if (i >= a.cols) continue;
        DS_UNROLL
        for (int k = 0; k < count; k++) {
          const float one = which ? dbias[Centre ? j : 0][k] : dweight[j][k];
          const float sum = from == 0 ? one : added[teams > 1 ? i + k : 0] + one;
          if (from == teams - 1)
            out[i + k] = sum;
          else
            added[teams > 1 ? i + k : 0] = sum;
        }
      }
    }
  }
}

// ---- rows of any length, at any address ------------------------------------------------------------------------------

constexpr int any_threads = 256;

DS_FN float weight_at(const void *p, std::int32_t dtype, std::int64_t i, float otherwise) {
  return p ? load(p, static_cast<Dtype>(dtype), i) : otherwise;
}

DS_FN void any_norm(const NormCall &a) {
  DS_SHARED float shared[any_threads / warp_threads];
  const Dtype dtype = static_cast<Dtype>(a.dtype);
  const std::int64_t first = block_index() * a.cols;
  const void *h = a.residual ? a.sum : a.x;
  float total = 0.0f, squares = 0.0f, mean = 0.0f;
  for (std::int64_t i = 4 * thread_index(); i < a.cols; i += 4 * any_threads) {
    const int m = quad_size(i, a.cols);
    Quad x = load_quad(a.x, dtype, first + i, m);
    if (a.residual) {
      const Quad r = load_quad(a.residual, dtype, first + i, m);
      DS_UNROLL
      for (int k = 0; k < 4; k++) x.v[k] = rounded(x.v[k] + r.v[k], dtype);
      store_quad(a.sum, dtype, first + i, m, x);
    }
    DS_UNROLL
    for (int k = 0; k < 4; k++) total += x.v[k], squares = fmaf(x.v[k], x.v[k], squares);
  }
  if (a.mean) {
    mean = team_sum<any_threads>(total, shared) * a.inverse;
    squares = 0.0f;
    for (std::int64_t i = 4 * thread_index(); i < a.cols; i += 4 * any_threads) {
      const int m = quad_size(i, a.cols);
      const Quad x = load_quad(h, dtype, first + i, m);  // what this very thread stored, if there is a residual
      DS_UNROLL
      for (int k = 0; k < 4; k++)
        if (k < m) squares = fmaf(x.v[k] - mean, x.v[k] - mean, squares);
    }
  }
  squares = team_sum<any_threads>(squares, shared);
  const float rstd = 1.0f / sqrtf(squares * a.inverse + a.eps);
  if (thread_index() == 0) {
    a.rstd[block_index()] = rstd;
    if (a.mean) a.mean[block_index()] = mean;
  }
  for (std::int64_t i = 4 * thread_index(); i < a.cols; i += 4 * any_threads) {
    const int m = quad_size(i, a.cols);
    Quad x = load_quad(h, dtype, first + i, m);
    DS_UNROLL
    for (int k = 0; k < 4; k++)
      if (k < m) {
        x.v[k] = (x.v[k] - mean) * rstd * weight_at(a.weight, a.weight_dtype, i + k, 1.0f);
        if (a.bias) x.v[k] += weight_at(a.bias, a.weight_dtype, i + k, 0.0f);
      }
    store_quad(a.y, dtype, first + i, m, x);
  }
}

// dweight and dbias: zeroed by the caller.
DS_FN void any_norm_grad(const NormGradCall &a) {
  DS_SHARED Pair shared[any_threads / warp_threads];
  const Dtype dtype = static_cast<Dtype>(a.dtype);
  const std::int64_t begin = block_index() * a.rows_per_block;
  const std::int64_t end = a.rows - begin < a.rows_per_block ? a.rows : begin + a.rows_per_block;
  float *dweight = a.dweight ? a.dweight + block_index() * a.cols : nullptr;
  float *dbias = a.dbias ? a.dbias + block_index() * a.cols : nullptr;
  for (std::int64_t row = begin; row < end; row++) {
    const std::int64_t first = row * a.cols;
    const float rstd = a.rstd[row], mean = a.mean ? a.mean[row] : 0.0f;
    Pair dot = {0.0f, 0.0f};
    for (std::int64_t i = thread_index(); i < a.cols; i += any_threads) {
      const float dy = load(a.dy, dtype, first + i), xhat = (load(a.h, dtype, first + i) - mean) * rstd;
      const float g = dy * weight_at(a.weight, a.weight_dtype, i, 1.0f);
      dot.a = fmaf(g, xhat, dot.a), dot.b += g;
      if (dweight) dweight[i] = fmaf(dy, xhat, dweight[i]);
      if (dbias) dbias[i] += dy;
    }
    dot = team_sum<any_threads>(dot, shared);
    const float along = dot.a * a.inverse, level = a.mean ? dot.b * a.inverse : 0.0f;
    for (std::int64_t i = thread_index(); i < a.cols; i += any_threads) {
      const float g = load(a.dy, dtype, first + i) * weight_at(a.weight, a.weight_dtype, i, 1.0f);
      const float xhat = (load(a.h, dtype, first + i) - mean) * rstd;
      float dx = fmaf(-xhat, along, g - level) * rstd;
      if (a.dsum) dx += load(a.dsum, dtype, first + i);
      store(a.dx, dtype, first + i, dx);
    }
  }
}

}  // namespace ds::cuda
