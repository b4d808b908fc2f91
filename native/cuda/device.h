// What every CUDA kernel of this folder uses: elements as fp32, four at a time; sums over a warp and a block; launches.
// Sources are plain C++ but for the launch, so that the same kernels run under tests/emulated.h on a machine without a GPU.
// Contraction into FMA is off: where an FMA is meant it is written, and results are those of the CPU kernels.
#pragma once
#include <ds/types.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define DS_FN static __device__ __forceinline__
#define DS_KERNEL static __global__
#define DS_SHARED __shared__
#define DS_UNROLL _Pragma("unroll")
#else
#define DS_UNROLL
#include "emulated.h"
#endif

namespace ds::cuda {

constexpr int block_threads = 256, warp_threads = 32, block_warps = block_threads / warp_threads;

#if defined(__CUDACC__)
using Stream = cudaStream_t;

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), std::int64_t blocks, Stream stream, Arguments... arguments) {
  if (blocks == 0) return Status::ok;
  if (blocks < 0 || blocks > 0x7fffffff) return Status::bad_argument;
  kernel<<<static_cast<unsigned>(blocks), block_threads, 0, stream>>>(arguments...);
  return cudaGetLastError() == cudaSuccess ? Status::ok : Status::launch_failed;
}
#endif

DS_FN float from_bits(std::uint32_t u) {
  union { std::uint32_t u; float f; } x;
  x.u = u;
  return x.f;
}
DS_FN std::uint32_t to_bits(float f) {
  union { std::uint32_t u; float f; } x;
  x.f = f;
  return x.u;
}

DS_FN float bf16_to_f32(std::uint16_t x) { return from_bits(static_cast<std::uint32_t>(x) << 16); }
#if defined(__CUDACC__)
DS_FN std::uint16_t f32_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }  // one instruction
DS_FN float f16_to_f32(std::uint16_t x) { return __half2float(__ushort_as_half(x)); }
DS_FN std::uint16_t f32_to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
#endif

DS_FN float load(const void *p, Dtype d, std::int64_t i) {
  if (d == Dtype::f32) return static_cast<const float *>(p)[i];
  const std::uint16_t h = static_cast<const std::uint16_t *>(p)[i];
  return d == Dtype::bf16 ? bf16_to_f32(h) : f16_to_f32(h);
}
DS_FN void store(void *p, Dtype d, std::int64_t i, float x) {
  if (d == Dtype::f32)
    static_cast<float *>(p)[i] = x;
  else
    static_cast<std::uint16_t *>(p)[i] = d == Dtype::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
}
// What a stored element reads as.
DS_FN float rounded(float x, Dtype d) {
  return d == Dtype::f32 ? x : d == Dtype::bf16 ? bf16_to_f32(f32_to_bf16(x)) : f16_to_f32(f32_to_f16(x));
}

struct Quad {  // four neighbours
  float v[4];
};
struct alignas(16) Words {
  float v[4];
};
struct alignas(8) Halves {
  std::uint16_t v[4];
};

// Whether elements [i, i + 4) can move in one instruction.
DS_FN bool in_one(const void *p, Dtype d, std::int64_t i) {
  const std::uintptr_t bytes = d == Dtype::f32 ? 4 : 2;
  return (reinterpret_cast<std::uintptr_t>(p) + static_cast<std::uintptr_t>(i) * bytes) % (4 * bytes) == 0;
}

// The first `m` of elements [i, i + 4); the rest is zero.
DS_FN Quad load_quad(const void *p, Dtype d, std::int64_t i, int m) {
  Quad q = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (m == 4 && in_one(p, d, i)) {
    if (d == Dtype::f32) {
      const Words w = *reinterpret_cast<const Words *>(static_cast<const float *>(p) + i);
      for (int k = 0; k < 4; k++) q.v[k] = w.v[k];
    } else {
      const Halves h = *reinterpret_cast<const Halves *>(static_cast<const std::uint16_t *>(p) + i);
      for (int k = 0; k < 4; k++) q.v[k] = d == Dtype::bf16 ? bf16_to_f32(h.v[k]) : f16_to_f32(h.v[k]);
    }
    return q;
  }
  for (int k = 0; k < 4; k++)
    if (k < m) q.v[k] = load(p, d, i + k);
  return q;
}
DS_FN void store_quad(void *p, Dtype d, std::int64_t i, int m, const Quad &q) {
  if (m == 4 && in_one(p, d, i)) {
    if (d == Dtype::f32) {
      *reinterpret_cast<Words *>(static_cast<float *>(p) + i) = {{q.v[0], q.v[1], q.v[2], q.v[3]}};
    } else {
      Halves h;
      for (int k = 0; k < 4; k++) h.v[k] = d == Dtype::bf16 ? f32_to_bf16(q.v[k]) : f32_to_f16(q.v[k]);
      *reinterpret_cast<Halves *>(static_cast<std::uint16_t *>(p) + i) = h;
    }
    return;
  }
  for (int k = 0; k < 4; k++)
    if (k < m) store(p, d, i + k, q.v[k]);
}
// a / b of numbers that are not negative: a division of 64 bits takes as long as the work on eight elements.
DS_FN std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b) : a / b;
}
DS_FN int quad_size(std::int64_t i, std::int64_t end) { return end - i < 4 ? static_cast<int>(end - i) : 4; }

template <class T>
DS_FN T warp_sum(T x) {
  for (int k = warp_threads / 2; k > 0; k /= 2) x += __shfl_xor_sync(0xffffffffu, x, k);
  return x;
}
template <class T>
DS_FN T warp_max(T x) {
  for (int k = warp_threads / 2; k > 0; k /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, x, k);
    x = other > x ? other : x;
  }
  return x;
}
// The sum over the block, in every thread; `shared` holds block_warps + 1 elements and may be used again afterwards.
template <class T>
DS_FN T block_sum(T x, T *shared) {
  x = warp_sum(x);
  const int warp = static_cast<int>(threadIdx.x) / warp_threads, lane = static_cast<int>(threadIdx.x) % warp_threads;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    T sum = shared[0];
    for (int w = 1; w < block_warps; w++) sum += shared[w];
    shared[block_warps] = sum;
  }
  __syncthreads();
  x = shared[block_warps];
  __syncthreads();
  return x;
}

}  // namespace ds::cuda
