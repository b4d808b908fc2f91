// Vocabulary of every kernel: element types, status codes.
#pragma once
#if defined(__CUDACC_RTC__)  // NVRTC brings no header of the C++ library
namespace std {
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
}  // namespace std
#else
#include <cstdint>
#endif

namespace ds {

// Element types; the numbers are shared with ds_ops/_call.py.
enum class Dtype : std::int32_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr std::int64_t size_of(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

// Of an array: the sum of its squares, and the largest magnitude. NaN where an element is.
struct Norms {
  double squares, peak;
};

// What a call returns. Kernels never throw; the bindings hand the number to ds_ops/_call.py.
enum class Status : std::int32_t { ok = 0, bad_argument = 1, bad_dtype = 2, launch_failed = 3, rank_failed = 4 };

}  // namespace ds
