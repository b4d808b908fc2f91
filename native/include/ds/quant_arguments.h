// How Python hands over a specification and rows: tuples in the order of the structures' members. For bindings only.
#pragma once
#include <ds/quant.h>
#include <pybind11/pybind11.h>

namespace ds {

// (bits, mantissa, bias, max_code, maximum, symmetric, stochastic, key0, key1, offset, group)
inline QuantSpec quant_spec(const pybind11::tuple &t) {
  QuantSpec s = {};
  s.format = {t[0].cast<std::int32_t>(), t[1].cast<std::int32_t>(), t[2].cast<std::int32_t>(),
              t[3].cast<std::int32_t>(), t[4].cast<float>()};
  s.symmetric = t[5].cast<bool>();
  s.stochastic = t[6].cast<bool>();
  s.key[0] = t[7].cast<std::uint32_t>();
  s.key[1] = t[8].cast<std::uint32_t>();
  s.offset = t[9].cast<std::int64_t>();
  s.group = t[10].cast<std::int64_t>();
  return s;
}

// (address, rows, cols, params_at, row_bytes)
inline QuantRows quant_rows(const pybind11::tuple &t) {
  return {reinterpret_cast<unsigned char *>(t[0].cast<std::uintptr_t>()), t[1].cast<std::int64_t>(),
          t[2].cast<std::int64_t>(), t[3].cast<std::int64_t>(), t[4].cast<std::int64_t>()};
}

}  // namespace ds
