// RMS norm over rows, with the addition of a residual in the same pass (torch's own layer norm is fast already). Formulas: ds_ops/norms.py.
// Statistics are summed in one order: the same bits on every instruction set and any number of threads.
#pragma once
#include <ds/types.h>

namespace ds {

// Row blocks whose weight gradients are summed apart; fixed, so that sums do not depend on threads.
constexpr std::int64_t norm_grad_blocks = 64;

// x [rows, cols] in `dtype`; weight fp32 [cols] or null; rstd fp32 [rows].
struct Norm {
  double eps;
  std::int64_t rows, cols;
  Dtype dtype;
  const void *x, *residual;  // residual null: none
  const float *weight;
  void *sum, *y;  // sum receives x + residual; null without a residual
  float *rstd;
};

// Backward from dy and, if not null, dsum (the gradient that reached x + residual by another way).
struct NormGrad {
  std::int64_t rows, cols;
  Dtype dtype;
  const void *h, *dy, *dsum;  // h: what was normalized
  const float *weight, *rstd;
  void *dx;
  float *dweight;  // [norm_grad_blocks, cols] partial sums, zeroed by the caller; null if not wanted
};

// h = x + residual (or x); y = h * rstd * weight with rstd = 1 / sqrt(sum h^2 / cols + eps). scratch: fp32 [threads, cols].
// Cost: one read of every input, one write of every output; fp32 without a residual: 8 bytes an element.
// Source: Zhang and Sennrich 2019.
Status norm(const Norm &n, float *scratch, int threads);
// With xhat = h * rstd and g = dy * weight: dx = rstd * (g - xhat * sum(g * xhat) / cols) + dsum; dweight += dy * xhat.
// scratch: fp32 [threads, 2, cols]. Cost: one read of h, dy and dsum, one write of dx; 12 bytes an element in fp32
// without dsum. Source: the derivative of the above.
Status norm_grad(const NormGrad &n, float *scratch, int threads);

}  // namespace ds
