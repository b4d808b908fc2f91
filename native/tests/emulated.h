// CUDA on the CPU, as far as native/cuda uses it: each block's threads are fibers that take turns, and give up theirs at a
// barrier or a shuffle. So the kernels themselves run, with their index arithmetic. (Not under the address sanitizer, which
// does not follow jumps between stacks.)
#pragma once
#include <ds/types.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define DS_FN static inline
#define DS_KERNEL static
#define DS_SHARED static  // one block runs at a time

namespace ds::cuda {

struct Index {
  std::int64_t x;
};

struct Jump {
  jmp_buf buffer;
};

struct Machine {
  static constexpr int threads = 256, stack_bytes = 64 << 10;
  jmp_buf home = {};
  std::vector<ucontext_t> starts = std::vector<ucontext_t>(threads);
  std::vector<Jump> fibers = std::vector<Jump>(threads);
  std::vector<std::vector<char>> stacks = std::vector<std::vector<char>>(threads, std::vector<char>(stack_bytes));
  std::vector<std::uint64_t> slots = std::vector<std::uint64_t>(threads);  // what each lane offers in a shuffle
  std::vector<int> state = std::vector<int>(threads);                      // 0 new, 1 waiting, 2 ended
  std::function<void()> body;
  std::uint64_t seed = 0;
  Index thread = {0}, block = {0};

  void yield() {
    const std::int64_t me = thread.x;
    if (_setjmp(fibers[static_cast<std::size_t>(me)].buffer) == 0) _longjmp(home, 1);
    thread.x = me;
  }
  // Runs thread `t` to its next barrier, shuffle, or end.
  void resume(std::size_t t) {
    thread.x = static_cast<std::int64_t>(t);
    if (_setjmp(home) != 0) return;
    if (state[t] == 1) _longjmp(fibers[t].buffer, 1);
    state[t] = 1;
    setcontext(&starts[t]);
  }
  static void enter();
  // 0..n-1 in an order drawn from `seed`; as they are while it is 0. A device promises no order of blocks or warps.
  std::vector<std::size_t> drawn(std::size_t n) {
    std::vector<std::size_t> order(n);
    for (std::size_t i = 0; i < n; i++) order[i] = i;
    for (std::size_t i = n; seed && i > 1; i--) {
      seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
      std::swap(order[i - 1], order[seed % i]);
    }
    return order;
  }
  void run(std::int64_t blocks, std::function<void()> kernel) {
    body = std::move(kernel);
    const std::vector<std::size_t> places = drawn(static_cast<std::size_t>(blocks));
    for (std::size_t b : places) {
      block.x = static_cast<std::int64_t>(b);
      const std::vector<std::size_t> turns = drawn(threads);
      for (std::size_t t = 0; t < threads; t++) {
        state[t] = 0;
        getcontext(&starts[t]);
        starts[t].uc_stack.ss_sp = stacks[t].data();
        starts[t].uc_stack.ss_size = stack_bytes;
        makecontext(&starts[t], enter, 0);
      }
      for (std::size_t ended = 0; ended < threads;) {  // a round of turns
        ended = 0;
        for (std::size_t t : turns) {
          if (state[t] != 2) resume(t);
          if (state[t] == 2) ended++;
        }
      }
    }
  }
};

inline Machine &machine() {
  static Machine one;
  return one;
}
inline void Machine::enter() {
  Machine &m = machine();
  m.body();
  m.state[static_cast<std::size_t>(m.thread.x)] = 2;
  _longjmp(m.home, 1);
}

#define threadIdx (ds::cuda::machine().thread)
#define blockIdx (ds::cuda::machine().block)

// All live threads of a block take the same barriers and shuffles in the same order, or their warp has left: then one
// round of turns between two of them is enough.
inline void __syncthreads() { machine().yield(); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  Machine &m = machine();
  std::memcpy(&m.slots[static_cast<std::size_t>(m.thread.x)], &x, sizeof x);
  m.yield();
  T other;
  std::memcpy(&other, &m.slots[static_cast<std::size_t>(m.thread.x ^ mask)], sizeof x);
  m.yield();  // nobody offers the next value before all have read this one
  return other;
}

using Stream = int;
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), std::int64_t blocks, Stream, Arguments... arguments) {
  if (blocks < 0 || blocks > 0x7fffffff) return Status::bad_argument;
  machine().run(blocks, [=] { kernel(arguments...); });
  return Status::ok;
}

// What the device's conversion instructions do.
inline std::uint16_t f32_to_bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(u >> 16 | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline float f16_to_f32(std::uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                     : std::ldexp(static_cast<float>(fraction), -24);
  return h >> 15 ? -value : value;
}
inline std::uint16_t f32_to_f16(float x) {
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
