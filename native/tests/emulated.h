// CUDA on the CPU, as far as native/cuda uses it: what a kernel calls, answered by tests/emulated_driver.cpp, which runs a block's threads
// as fibers that take turns and give up theirs at a barrier or a shuffle. So the kernels themselves run, with their index arithmetic.
#pragma once
#include <ds/types.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define DS_FN static inline
#define DS_MEMBER inline
#define DS_SHARED static  // one block runs at a time

namespace ds::cuda {

struct Index {
  std::int64_t x;
};

// What the driver gives a kernel: where it runs, and how it waits.
struct Emulator {
  Index thread, block;
  void (*yield)();
  std::uint64_t *slots;  // what each thread offers in a shuffle
};

static Emulator *emulator;

#define threadIdx (ds::cuda::emulator->thread)
#define blockIdx (ds::cuda::emulator->block)

// A compiled kernel is a library with this one function, and the size of its argument for the driver to check.
#define DS_ENTRY(entry, threads, resident, Call, ...)                                            \
  extern "C" {                                                                                    \
  std::int64_t entry##_size = sizeof(ds::cuda::Call);                                             \
  void entry(const void *arguments, ds::cuda::Emulator *from) {                                   \
    ds::cuda::emulator = from;                                                                    \
    using namespace ds::cuda;                                                                     \
    using ds::Dtype;                                                                              \
    __VA_ARGS__(*static_cast<const ds::cuda::Call *>(arguments));                                 \
  }                                                                                               \
  }

// All live threads of a block take the same barriers and shuffles in the same order, or their warp has left: then one round of turns
// between two of them is enough.
static inline void __syncthreads() { emulator->yield(); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  std::memcpy(&emulator->slots[emulator->thread.x], &x, sizeof x);
  emulator->yield();
  T other;
  std::memcpy(&other, &emulator->slots[emulator->thread.x ^ mask], sizeof x);
  emulator->yield();  // nobody offers the next value before all have read this one
  return other;
}

static inline std::uint32_t __byte_perm(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t all = static_cast<std::uint64_t>(b) << 32 | a;
  std::uint32_t out = 0;
  for (int k = 0; k < 4; k++) out |= static_cast<std::uint32_t>(all >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
  return out;
}
static inline std::uint32_t __funnelshift_l(std::uint32_t low, std::uint32_t high, std::uint32_t shift) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}

// What the device's conversion instructions do.
static inline std::uint16_t f32_to_bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(u >> 16 | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
static inline float f16_to_f32(std::uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                     : std::ldexp(static_cast<float>(fraction), -24);
  return h >> 15 ? -value : value;
}
static inline std::uint16_t f32_to_f16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  const auto sign = static_cast<std::uint16_t>(u >> 16 & 0x8000u);
  if (x != x) return static_cast<std::uint16_t>(sign | 0x7e00u);
  const float a = std::fabs(x);
  if (a == 0.0f) return sign;
  if (a >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00u);
  int exponent = 0;
  std::frexp(a, &exponent);
  if (exponent < -13) exponent = -13;  // subnormals share the spacing of the smallest normal numbers
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(a, 11 - exponent)));
  return static_cast<std::uint16_t>(sign | ((static_cast<std::uint32_t>(exponent + 13) << 10) + units));
}

}  // namespace ds::cuda
