// What all callers of the products of packed weights share.
#pragma once
#include <ds/decoder.h>

namespace ds::decoder {

// Whether the kernels can read such a matrix.
bool fits(const Matrix &m);

// Panels of so many bytes that stay in the second-level cache while a thread's weights pass.
inline Word block_panels(Word bytes) {
  const Word fit = (384 << 10) / bytes;
  return fit > 1 ? fit : 1;
}

inline Word unit_bytes(const Matrix &m) {
  const Word bits = m.kind == Kind::f32 ? 32 : m.kind == Kind::bf16 ? 16 : m.kind == Kind::int8 ? 8 : 4;
  return m.k * unit * bits / 8;
}

// Which part of the unit after `u` the product of panel number `panel` of `panels` asks for. The first panel that is multiplied with a
// unit waits for memory, the others for the multiplier: with this they share the wait. end: the unit after the last of this thread.
inline Ahead ahead_of(const Matrix &m, Word u, Word end, Word panel, Word panels) {
  if (u >= end) return {};
  const Word each = unit_bytes(m) / 64 / (m.k / 8), wanted = (each + panels - 1) / panels, step = m.k / 8 * wanted * 64;
  if (panel * step >= unit_bytes(m)) return {};
  return {static_cast<const char *>(m.data) + u * unit_bytes(m) + panel * step, static_cast<int>(wanted)};
}

}  // namespace ds::decoder
