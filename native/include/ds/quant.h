// Groupwise quantization: every group of elements shares one scale. Formulas and layout: ds_ops/formats.py, the
// definition in plain torch: ds_ops/reference/quant.py. All results are the same bits on every instruction set.
#pragma once
#include <ds/types.h>

namespace ds {

// Codes: integers of `bits` bits (mantissa < 0), or sign, exponent and `mantissa` bits with the given exponent bias.
struct QuantFormat {
  std::int32_t bits, mantissa, bias;
  std::int32_t max_code;  // largest magnitude: 127, 7, or the code of `maximum`
  float maximum;          // the value of max_code at scale 1
};

struct QuantSpec {
  QuantFormat format;
  bool symmetric, stochastic;
  std::uint32_t key[2];  // of the random draws
  std::int64_t offset;   // index of the first element in the sequence of draws
  std::int64_t group;    // elements; group * bits is a whole number of bytes
};

// Rows of codes and parameters in one buffer: row r starts at base + r * row_bytes, holds the packed codes of `cols`
// elements and, from byte params_at on, a scale (and, if asymmetric, a zero point) per group, fp32.
struct QuantRows {
  unsigned char *base;
  std::int64_t rows, cols, params_at, row_bytes;
};

constexpr std::int64_t quant_params(const QuantSpec &s) { return s.symmetric ? 1 : 2; }
constexpr std::int64_t quant_groups(const QuantSpec &s, std::int64_t cols) { return (cols + s.group - 1) / s.group; }

// codes = round(x / scale) of x [rows, cols], f32, bf16 or f16, into `q`; row r goes to row order[r] (null: r).
// Source: Wang et al. 2023 (groups); OCP microscaling formats 2023. Cost: one read, bits/8 + 4/group bytes written an element.
Status quantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *order, const void *x, Dtype dtype,
                int threads);

// out = (code - zero) * scale of rows index[0..count) of `q` (null: the first `count`), out [count, cols] in `dtype`, product
// in fp32. Cost: bits/8 + 4/group bytes read, one write an element, past the cache from 8 MiB on. Source: as quantize.
Status dequantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *index, std::int64_t count, void *out,
                  Dtype dtype, int threads);

// q is `sources` blocks of rows: out[r] = factor * sum over k of row k * rows/sources + r, in order of k, in fp32.
// out [rows / sources, cols] in `dtype`. Cost: sources * (bits/8 + 4/group) bytes read, one write an element.
// Source: Wang et al. 2023.
Status reduce(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, void *out, Dtype dtype,
              int threads);

// out = quantize(the same sum), fp32 in between. out.cols = q.cols; so.group is a multiple of s.group.
// scratch: fp32 [threads, so.group]. Cost: (sources + 1) * (bits/8 + 4/group) bytes an element. Source: Wang et al. 2023.
Status reduce_quantized(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, const QuantSpec &so,
                        const QuantRows &out, float *scratch, int threads);

}  // namespace ds
