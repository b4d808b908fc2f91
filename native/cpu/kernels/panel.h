// How inputs lie for the products of decoder_dense.cpp, and which instructions those have here.
//
// A *panel* is up to `panel_rows` rows side by side, so that what one step of a product reads is contiguous: 32-bit word w of
// row r is at w * tall + r, tall being the rows that the panel has place for. A word is one fp32 input, a pair of bf16, or four
// bytes. Codes are followed by [groups][tall] scales of bytes, and by as many sums of the group's inputs, fp32.
#pragma once
#include <ds/decoder.h>

#include "staging.h"

#if defined(__AVX512F__) && DS_LANES == 16
#define DS_DOTS 1  // functions with more instructions than the level has, called where the processor has them
#endif

namespace {

using namespace ds::decoder;

DS_INLINE bool of_codes(const Matrix &m) { return m.kind == Kind::int8 || m.kind == Kind::int4; }

DS_INLINE Word groups_of(const Matrix &m) { return of_codes(m) ? (m.k + m.group - 1) / m.group : 0; }

// Whether the processor multiplies such inputs as they are. Without, they are rounded all the same, and multiplied as fp32.
DS_INLINE bool has_dots(const Matrix &m) {
#if defined(DS_DOTS)
  if (m.inputs == Inputs::int8) return __builtin_cpu_supports("avx512vnni");
  if (m.inputs == Inputs::bf16) return __builtin_cpu_supports("avx512bf16");
#endif
  (void)m;
  return false;
}

// Words of one row's inputs.
DS_INLINE Word words_of(const Matrix &m, bool dots) { return dots ? m.k / (m.inputs == Inputs::int8 ? 4 : 2) : m.k; }

}  // namespace
