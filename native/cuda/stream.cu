// Passes over one flat range: sum of squares, conversion, fill, comparison with a conversion.
#include "device.h"

namespace ds::cuda {

constexpr int stream_threads = 256;
constexpr std::int64_t stream_chunk = 8192;  // elements that one block converts or fills

struct SumSquaresCall {
  const void *x;
  double *partials;  // one a block
  std::int64_t n, stride;
  std::int32_t dtype;
};
DS_FN void sum_squares(const SumSquaresCall &a) {
  DS_SHARED double shared[stream_threads / warp_threads];
  const Dtype dtype = static_cast<Dtype>(a.dtype);
  double sum = 0.0;
  for (std::int64_t i = 4 * (block_index() * stream_threads + thread_index()); i < a.n; i += a.stride) {
    const Quad q = load_quad(a.x, dtype, i, quad_size(i, a.n));
    DS_UNROLL
    for (int k = 0; k < 4; k++) sum += static_cast<double>(q.v[k]) * static_cast<double>(q.v[k]);
  }
  sum = team_sum<stream_threads>(sum, shared);
  if (thread_index() == 0) a.partials[block_index()] = sum;
}

struct ConvertCall {
  void *out;
  const void *x;  // null: fill
  std::int64_t n;
  std::int32_t out_dtype, dtype;
  float scale;  // or what is filled with
};
template <bool Fill>
DS_FN void convert(const ConvertCall &a) {
  const std::int64_t begin = block_index() * stream_chunk, end = a.n - begin < stream_chunk ? a.n : begin + stream_chunk;
  for (std::int64_t i = begin + 4 * thread_index(); i < end; i += 4 * stream_threads) {
    Quad q = {{a.scale, a.scale, a.scale, a.scale}};
    if (!Fill) {
      q = load_quad(a.x, static_cast<Dtype>(a.dtype), i, quad_size(i, end));
      DS_UNROLL
      for (int k = 0; k < 4; k++) q.v[k] *= a.scale;
    }
    store_quad(a.out, static_cast<Dtype>(a.out_dtype), i, quad_size(i, end), q);
  }
}

struct CompareCall {
  const void *out, *x;
  std::uint8_t *differs;  // one byte, 0 before; nobody writes anything but 1
  std::int64_t n;
  std::int32_t out_dtype, dtype;
};
DS_FN void compare_cast(const CompareCall &a) {
  const Dtype dtype = static_cast<Dtype>(a.out_dtype);
  const std::int64_t begin = block_index() * stream_chunk, end = a.n - begin < stream_chunk ? a.n : begin + stream_chunk;
  bool differs = false;
  for (std::int64_t i = begin + 4 * thread_index(); i < end; i += 4 * stream_threads) {
    const int m = quad_size(i, end);
    const Quad out = load_quad(a.out, dtype, i, m), x = load_quad(a.x, static_cast<Dtype>(a.dtype), i, m);
    DS_UNROLL
    for (int k = 0; k < 4; k++) differs |= out.v[k] != rounded(x.v[k], dtype);
  }
  if (differs) *a.differs = 1;
}

}  // namespace ds::cuda
