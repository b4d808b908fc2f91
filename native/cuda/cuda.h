// The CUDA kernels' entries: as those of the CPU in include/ds, with a stream in place of threads. All memory they are
// given is the device's. They return after the launch.
#pragma once
#include <ds/norm.h>
#include <ds/quant.h>
#include <ds/update.h>

#include "device.h"

namespace ds::cuda {

// Elements of one tensor that one block updates.
constexpr std::int64_t update_chunk = 8192;

// As ds::update, in one launch. rows: int64 [7, count] on the device: numel, addresses of param, grad, state0, state1,
// copy (0 where absent), and the number of chunks of all tensors before. u.list has the element types and the count only;
// u.partials: fp64 [chunks, 2] for lamb_moments.
Status update(const Update &u, const std::int64_t *rows, std::int64_t chunks, Stream stream);

// Partial sums, fp64, that sum_squares may write; the caller zeroes them. Fixed: the sum does not depend on the device.
constexpr std::int64_t sum_blocks = 1024;
Status sum_squares(const void *x, Dtype dtype, std::int64_t n, double *partials, Stream stream);
Status convert(void *dst, Dtype dst_dtype, const void *src, Dtype src_dtype, std::int64_t n, float scale, Stream stream);
Status fill(void *dst, Dtype dtype, std::int64_t n, float value, Stream stream);

Status quantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *order, const void *x, Dtype dtype,
                Stream stream);
Status dequantize(const QuantSpec &s, const QuantRows &q, const std::int64_t *index, std::int64_t count, void *out,
                  Dtype dtype, Stream stream);
Status reduce(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, void *out, Dtype dtype,
              Stream stream);
Status reduce_quantized(const QuantSpec &s, const QuantRows &q, std::int64_t sources, float factor, const QuantSpec &so,
                        const QuantRows &out, Stream stream);

// Row blocks whose weight gradients are summed apart: dweight is fp32 [norm_grad_blocks, cols], zeroed by the caller.
constexpr std::int64_t norm_grad_blocks = 512;
Status norm(const Norm &n, Stream stream);
Status norm_grad(const NormGrad &n, Stream stream);

}  // namespace ds::cuda
