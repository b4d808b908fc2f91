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

}  // namespace ds::decoder
