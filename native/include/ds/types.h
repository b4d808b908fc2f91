// Vocabulary of every kernel: element types, status codes.
#pragma once
#include <cstdint>

namespace ds {

// Element types; the numbers are shared with ds_ops/_call.py.
enum class Dtype : std::int32_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr std::int64_t size_of(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

// What a call returns. Kernels never throw; the bindings hand the number to ds_ops/_call.py.
enum class Status : std::int32_t { ok = 0, bad_argument = 1, bad_dtype = 2, launch_failed = 3, rank_failed = 4 };

}  // namespace ds
