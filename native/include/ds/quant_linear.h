// Products of activations with quantized weights, for few tokens: weights are read once as codes, and never stored as numbers.
#pragma once
#include <ds/quant.h>

namespace ds {

// y[t, r] = sum over k of x[t, k] * value(q[first + r, k]), value = (code - zero) * scale, for r in [0, rows).
// x: fp32 [tokens, q.cols]; y: fp32, row t at y + t * y_stride. q in any of the formats of quant.h. Sums are fp32, the same bits
// on any number of threads; instruction sets differ in the last ones. Cost: bits/8 + 4/group bytes read an element of q for each
// 8 tokens. Source: as quantize (Wang et al. 2023); the order of work is that of a matrix-vector product.
Status quant_linear(const QuantSpec &s, const QuantRows &q, std::int64_t first, std::int64_t rows, const float *x,
                    std::int64_t tokens, float *y, std::int64_t y_stride, int threads);

}  // namespace ds
