// One row at a time: widened to fp32, its statistics, then the result. The row stays in the cache in between.
#include <ds/norm.h>

#include "declare.h"
#include "staging.h"

namespace {

using ds::Norm;
using ds::NormGrad;

constexpr std::int64_t piece = 512;

// Sums f over [0, n): f(i) gives the elements [i, i + lanes), f_tail(i, r) the last r of them, then zeros. Pieces are
// summed in 64 fp32 lanes whatever the vector width, folded to 16, and added up in fp64: 8 fp32 additions in a row.
template <class F, class G>
DS_INLINE double sum_of(std::int64_t n, F f, G f_tail) {
  constexpr int vectors = 64 / lanes, quarter = vectors / 4, half = lanes / 2;
  vd wide[2 * quarter] = {};
  for (std::int64_t first = 0; first < n; first += piece) {
    const std::int64_t end = n - first < piece ? n : first + piece;
    vf acc[vectors] = {};
    std::int64_t i = first;
    for (; i + 64 <= end; i += 64)
      for (int k = 0; k < vectors; k++) acc[k] += f(i + k * lanes);
    for (int k = 0; k < vectors && i + k * lanes < end; k++) {
      const std::int64_t j = i + k * lanes;
      acc[k] += end - j < lanes ? f_tail(j, end - j) : f(j);
    }
    for (int k = 0; k < quarter; k++) {
      const vf folded = (acc[k] + acc[k + 2 * quarter]) + (acc[k + quarter] + acc[k + 3 * quarter]);
      const float *p = reinterpret_cast<const float *>(&folded);
      wide[2 * k] += widen(load<vf_half>(p));
      wide[2 * k + 1] += widen(load<vf_half>(p + half));
    }
  }
  double sum = 0.0;
  for (int k = 0; k < 2 * quarter; k++)
    for (int l = 0; l < half; l++) sum += wide[k][l];
  return sum;
}

static double dot_row(const float *a, const float *b, std::int64_t n) {
  return sum_of(
      n, [&](std::int64_t i) { return load<vf>(a + i) * load<vf>(b + i); },
      [&](std::int64_t i, std::int64_t r) { return load_part<vf>(a + i, r) * load_part<vf>(b + i, r); });
}

// f(i, load) for whole vectors and the tail: `get(p)` reads element i.. of an fp32 row, the result is stored to out.
template <class F>
DS_INLINE void map_row(float *out, std::int64_t n, F f) {
  each_vector(
      n,
      [&](std::int64_t i) { store(out + i, f([i](const float *p) { return load<vf>(p + i); })); },
      [&](std::int64_t i, std::int64_t r) {
        store_part(out + i, f([i, r](const float *p) { return load_part<vf>(p + i, r); }), r);
      });
}

// Row `base` of `n` elements as fp32: the memory itself, or a copy in `row`.
static const float *fp32_row(const void *base, Dtype d, std::int64_t n, float *row) {
  if (d == Dtype::f32) return static_cast<const float *>(base);
  widen(row, base, d, n);
  return row;
}

// h = x + residual, rounded to the stored type so that the backward sees what the forward normalized.
static const float *add_rows(const Norm &n, const void *x, const void *residual, void *sum, float *row) {
  alignas(64) float other[piece];
  for (std::int64_t i = 0; i < n.cols; i += piece) {
    const std::int64_t m = n.cols - i < piece ? n.cols - i : piece;
    const float *a = fp32_row(at(x, n.dtype, i), n.dtype, m, row + i);
    const float *b = fp32_row(at(residual, n.dtype, i), n.dtype, m, other);
    map_row(row + i, m, [&](auto get) { return get(a) + get(b); });
    if (n.dtype == Dtype::f32)
      std::memcpy(static_cast<float *>(sum) + i, row + i, static_cast<std::size_t>(m) * 4);
    else
      narrow(at(sum, n.dtype, i), n.dtype, row + i, m), widen(row + i, at(sum, n.dtype, i), n.dtype, m);
  }
  return row;
}

static void write_row(const Norm &n, void *y, const float *h, float rstd) {
  alignas(64) float block[piece];
  for (std::int64_t i = 0; i < n.cols; i += piece) {
    const std::int64_t m = n.cols - i < piece ? n.cols - i : piece;
    float *out = n.dtype == Dtype::f32 ? static_cast<float *>(y) + i : block;
    map_row(out, m, [&](auto get) {
      const vf v = get(h + i) * rstd;
      return n.weight ? v * get(n.weight + i) : v;
    });
    stage_out(y, n.dtype, i, m, out);
  }
}

// g = dy * weight and xhat of one row; adds dy * xhat to the gradient of the weight. Returns the sum of g * xhat. One pass:
// every number is read once, whatever is made of it.
template <bool weighted, bool wanted>
static double prepare_row(const NormGrad &n, std::int64_t row, float *g, float *xhat, float *dweight) {
  const float rstd = n.rstd[row], *weight = n.weight;
  const float *h = fp32_row(at(n.h, n.dtype, row * n.cols), n.dtype, n.cols, xhat);
  const float *dy = fp32_row(at(n.dy, n.dtype, row * n.cols), n.dtype, n.cols, g);
  auto step = [&](auto get, auto put, std::int64_t i) {
    const vf x = get(h + i) * rstd, d = get(dy + i), along = weighted ? d * get(weight + i) : d;
    if (wanted) put(dweight + i, get(dweight + i) + d * x);
    put(xhat + i, x);
    put(g + i, along);
    return along * x;
  };
  return sum_of(
      n.cols,
      [&](std::int64_t i) {
        return step([](const float *p) { return load<vf>(p); }, [](float *p, vf v) { store(p, v); }, i);
      },
      [&](std::int64_t i, std::int64_t r) {
        return step([r](const float *p) { return load_part<vf>(p, r); }, [r](float *p, vf v) { store_part(p, v, r); }, i);
      });
}

static double prepare(const NormGrad &n, std::int64_t row, float *g, float *xhat, float *dweight) {
  if (n.weight) return dweight ? prepare_row<true, true>(n, row, g, xhat, dweight) : prepare_row<true, false>(n, row, g, xhat, dweight);
  return dweight ? prepare_row<false, true>(n, row, g, xhat, dweight) : prepare_row<false, false>(n, row, g, xhat, dweight);
}

static void grad_row(const NormGrad &n, std::int64_t row, float *g, const float *xhat, double sum) {
  alignas(64) float other[piece];
  const float along = static_cast<float>(sum / static_cast<double>(n.cols));
  const float rstd = n.rstd[row];
  for (std::int64_t i = 0; i < n.cols; i += piece) {
    const std::int64_t m = n.cols - i < piece ? n.cols - i : piece, first = row * n.cols + i;
    float *out = n.dtype == Dtype::f32 ? static_cast<float *>(n.dx) + first : g + i;
    map_row(out, m, [&](auto get) { return (get(g + i) - get(xhat + i) * along) * rstd; });
    if (n.dsum) {
      const float *dsum = fp32_row(at(n.dsum, n.dtype, first), n.dtype, m, other);
      map_row(out, m, [&](auto get) { return get(out) + get(dsum); });
    }
    stage_out(n.dx, n.dtype, first, m, out);
  }
}

}  // namespace

namespace ds::DS_ISA {

void norm_rows(const Norm &n, std::int64_t begin, std::int64_t end, float *scratch) {
  const double count = static_cast<double>(n.cols);
  for (std::int64_t row = begin; row < end; row++) {
    const std::int64_t first = row * n.cols;
    const float *h = n.residual ? add_rows(n, at(n.x, n.dtype, first), at(n.residual, n.dtype, first),
                                           at(n.sum, n.dtype, first), scratch)
                                : fp32_row(at(n.x, n.dtype, first), n.dtype, n.cols, scratch);
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(dot_row(h, h, n.cols) / count + n.eps));
    n.rstd[row] = rstd;
    write_row(n, at(n.y, n.dtype, first), h, rstd);
  }
}

void norm_grad_rows(const NormGrad &n, std::int64_t begin, std::int64_t end, std::int64_t block, float *scratch) {
  float *dweight = n.dweight ? n.dweight + block * n.cols : nullptr;
  for (std::int64_t row = begin; row < end; row++) {
    const double sum = prepare(n, row, scratch, scratch + n.cols, dweight);
    grad_row(n, row, scratch, scratch + n.cols, sum);
  }
}

}  // namespace ds::DS_ISA
