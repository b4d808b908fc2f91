// What every CUDA kernel of this folder uses: elements as fp32, 16 bytes at a time; sums over the threads that share a row; the entry.
// A source is compiled by NVRTC for the card that is there, and as C++ for tests/emulated.h, where the same kernels run without a GPU.
// So it includes nothing but files of native/. Contraction into FMA is off: where an FMA is meant it is written, as on the CPU.
//
// A kernel is a function template `template <...> DS_FN void name(const NameCall &)`: what is known when it is chosen is a parameter of the
// template, and `NameCall` holds the rest. ds_ops' choosers name the instance and pack the structure.
#pragma once
#include <ds/types.h>

#if defined(__CUDACC__)
#define DS_FN static __device__ __forceinline__
#define DS_MEMBER __device__ __forceinline__
#define DS_SHARED __shared__
#define DS_UNROLL _Pragma("unroll")
#define DS_RESTRICT __restrict__
// The kernel `entry`: `threads` a block, of which `resident` blocks fit a multiprocessor; calls the template instance at the end.
#define DS_ENTRY(entry, threads, resident, Call, ...)                                                    \
  extern "C" __global__ void __launch_bounds__(threads, resident) entry(const ds::cuda::Call arguments) { \
    using namespace ds::cuda;                                                                            \
    using ds::Dtype;                                                                                     \
    __VA_ARGS__(arguments);                                                                              \
  }
#else
#define DS_UNROLL
#define DS_RESTRICT
#include "emulated.h"
#endif

namespace ds::cuda {

constexpr int warp_threads = 32;

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
DS_FN float f16_to_f32(std::uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
DS_FN std::uint16_t f32_to_f16(float x) {
  std::uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
DS_FN std::uint16_t f32_to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  std::uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const std::uint32_t u = to_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<std::uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
}
#endif

// Two neighbours as they lie in memory; the first is the lower half.
template <Dtype D>
DS_FN std::uint32_t pack_pair(float low, float high) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
  std::uint32_t y;
  if (D == Dtype::bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return D == Dtype::bf16 ? f32_to_bf16(low) | static_cast<std::uint32_t>(f32_to_bf16(high)) << 16
                          : f32_to_f16(low) | static_cast<std::uint32_t>(f32_to_f16(high)) << 16;
#endif
}
template <Dtype D>
DS_FN float low_of(std::uint32_t pair) {
  return D == Dtype::bf16 ? from_bits(pair << 16) : f16_to_f32(static_cast<std::uint16_t>(pair));
}
template <Dtype D>
DS_FN float high_of(std::uint32_t pair) {
  return D == Dtype::bf16 ? from_bits(pair & 0xffff0000u) : f16_to_f32(static_cast<std::uint16_t>(pair >> 16));
}

// ---- one element, of a type that is known at run time ---------------------------------------------------------------

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

// ---- sixteen bytes of a type that is known when the kernel is compiled ------------------------------------------------

struct alignas(16) Words {  // as one instruction loads and stores them
  std::uint32_t w[4];
};
struct alignas(8) HalfWords {
  std::uint32_t w[2];
};

template <Dtype D>
struct Lanes {  // elements of 16 bytes
  static constexpr int count = D == Dtype::f32 ? 4 : 8;
};

DS_FN Words load_words(const void *p, std::int64_t i) { return static_cast<const Words *>(p)[i]; }
DS_FN void store_words(void *p, std::int64_t i, const Words &x) { static_cast<Words *>(p)[i] = x; }

template <Dtype D>
DS_FN float element(const Words &x, int k) {
  if constexpr (D == Dtype::f32)
    return from_bits(x.w[k]);
  else
    return k % 2 ? high_of<D>(x.w[k / 2]) : low_of<D>(x.w[k / 2]);
}
template <Dtype D>
DS_FN Words words_of(const float *x) {
  Words y;
  DS_UNROLL
  for (int k = 0; k < 4; k++) {
    if constexpr (D == Dtype::f32)
      y.w[k] = to_bits(x[k]);
    else
      y.w[k] = pack_pair<D>(x[2 * k], x[2 * k + 1]);
  }
  return y;
}

// ---- four elements of a type that is known at run time ------------------------------------------------------------------

struct Quad {
  float v[4];
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
      DS_UNROLL
      for (int k = 0; k < 4; k++) q.v[k] = from_bits(w.w[k]);
    } else {
      const HalfWords h = *reinterpret_cast<const HalfWords *>(static_cast<const std::uint16_t *>(p) + i);
      DS_UNROLL
      for (int k = 0; k < 4; k++) {
        const std::uint16_t x = static_cast<std::uint16_t>(h.w[k / 2] >> (k % 2 * 16));
        q.v[k] = d == Dtype::bf16 ? bf16_to_f32(x) : f16_to_f32(x);
      }
    }
    return q;
  }
  DS_UNROLL
  for (int k = 0; k < 4; k++)
    if (k < m) q.v[k] = load(p, d, i + k);
  return q;
}
DS_FN void store_quad(void *p, Dtype d, std::int64_t i, int m, const Quad &q) {
  if (m == 4 && in_one(p, d, i)) {
    if (d == Dtype::f32) {
      *reinterpret_cast<Words *>(static_cast<float *>(p) + i) = words_of<Dtype::f32>(q.v);
    } else {
      HalfWords h;
      DS_UNROLL
      for (int k = 0; k < 2; k++)
        h.w[k] = d == Dtype::bf16 ? pack_pair<Dtype::bf16>(q.v[2 * k], q.v[2 * k + 1])
                                  : pack_pair<Dtype::f16>(q.v[2 * k], q.v[2 * k + 1]);
      *reinterpret_cast<HalfWords *>(static_cast<std::uint16_t *>(p) + i) = h;
    }
    return;
  }
  DS_UNROLL
  for (int k = 0; k < 4; k++)
    if (k < m) store(p, d, i + k, q.v[k]);
}
DS_FN int quad_size(std::int64_t i, std::int64_t end) { return end - i < 4 ? static_cast<int>(end - i) : 4; }

// ---- indices ------------------------------------------------------------------------------------------------------------

DS_FN std::int64_t block_index() { return static_cast<std::int64_t>(blockIdx.x); }
DS_FN int thread_index() { return static_cast<int>(threadIdx.x); }

// a / b of numbers that are not negative: a division of 64 bits takes as long as the work on eight elements.
DS_FN std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b) : a / b;
}
// A divisor that the host has prepared, for numbers below 2^31: ds_ops.cuda_launch.divisor.
struct Divisor {
  std::uint32_t factor;
  std::int32_t shift;
};
DS_FN std::uint32_t divide(std::uint32_t a, Divisor d) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(a) * d.factor >> d.shift);
}

// ---- sums ---------------------------------------------------------------------------------------------------------------

// What the lane whose index differs in the bits of `k` holds; types that are no number have an overload.
template <class T>
DS_FN T exchange(unsigned others, const T &x, int k) {
  return __shfl_xor_sync(others, x, k);
}
// The lanes of the caller's group of `Threads`, as a mask.
template <int Threads>
DS_FN unsigned group_lanes() {
  if (Threads == warp_threads) return 0xffffffffu;
  return ((1u << Threads % warp_threads) - 1u) << thread_index() % warp_threads / Threads * Threads;
}
template <int Threads, class T>
DS_FN T shuffle_sum(T x) {
  const unsigned others = group_lanes<Threads>();
  DS_UNROLL
  for (int k = Threads / 2; k > 0; k /= 2) x += exchange(others, x, k);
  return x;
}
template <int Threads, class T>
DS_FN T shuffle_max(T x) {
  const unsigned others = group_lanes<Threads>();
  DS_UNROLL
  for (int k = Threads / 2; k > 0; k /= 2) {
    const T other = exchange(others, x, k);
    x = other > x ? other : x;
  }
  return x;
}
// The sum over the `Threads` neighbours that share a row, in each of them, in a fixed order. All threads of the block come here.
// `shared`: one element a warp of the block; it may be used again afterwards.
template <int Threads, class T>
DS_FN T team_sum(T x, T *shared) {
  if constexpr (Threads <= warp_threads) {
    return shuffle_sum<Threads>(x);
  } else {
    x = shuffle_sum<warp_threads>(x);
    constexpr int warps = Threads / warp_threads;
    const int warp = thread_index() / warp_threads;
    if (thread_index() % warp_threads == 0) shared[warp] = x;
    __syncthreads();
    T sum = shared[warp / warps * warps];
    DS_UNROLL
    for (int w = 1; w < warps; w++) sum += shared[warp / warps * warps + w];
    __syncthreads();
    return sum;
  }
}

}  // namespace ds::cuda
