// Products of packed weights: every level, every kind, any number of rows, against plain loops.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/table.h"

namespace {

using namespace ds::decoder;

struct Packing {
  std::vector<std::uint32_t> words;
  std::vector<float> params, numbers;  // numbers [32][k]: what the codes mean
  Matrix matrix;
};

Packing make(Kind kind, Inputs inputs, Word k, Word group, Random &r) {
  Packing p;
  const Word bits = kind == Kind::f32 ? 32 : kind == Kind::bf16 ? 16 : kind == Kind::int8 ? 8 : 4;
  const Word each = 32 / bits, groups = (k + group - 1) / group;
  p.words.assign(static_cast<std::size_t>(k / each * 32), 0);
  p.numbers.assign(static_cast<std::size_t>(32 * k), 0.0f);
  p.params.assign(static_cast<std::size_t>(groups * 64), 0.0f);
  for (Word g = 0; g < groups; g++)
    for (Word n = 0; n < 32; n++) {
      p.params[static_cast<std::size_t>(g * 64 + n)] = 0.01f * (1.0f + r.unit() * 0.5f);
      p.params[static_cast<std::size_t>(g * 64 + 32 + n)] = static_cast<float>(r.bits() % (kind == Kind::int8 ? 256 : 16));
    }
  for (Word i = 0; i < k; i++)
    for (Word n = 0; n < 32; n++) {
      float x = r.unit();
      std::uint32_t u;
      std::memcpy(&u, &x, 4);
      std::uint32_t &word = p.words[static_cast<std::size_t>(i / each * 32 + n)];
      if (kind == Kind::f32) {
        word = u;
      } else if (kind == Kind::bf16) {
        u &= 0xffff0000u;
        word |= i % 2 ? u : u >> 16;
        std::memcpy(&x, &u, 4);
      } else {
        const std::uint32_t code = r.bits() >> (32 - bits);
        const Word shift = kind == Kind::int8 ? 8 * (i % 4) : 8 * (i % 4) + (i % 8 >= 4 ? 4 : 0);
        word |= code << shift;
        const float *param = p.params.data() + i / group * 64 + n;
        x = (static_cast<float>(code) - param[32]) * param[0];
      }
      p.numbers[static_cast<std::size_t>(n * k + i)] = x;
    }
  p.matrix = {p.words.data(), p.params.data(), nullptr, 32, k, group, kind, inputs};
  return p;
}

void products_are_right(const ds::Kernels &level, Kind kind, Inputs inputs, Word k, Word group, int rows) {
  Random r{static_cast<std::uint64_t>(k * 100 + rows)};
  const Packing p = make(kind, inputs, k, group, r);
  const Word tall = rows <= 4 ? rows : panel_rows;
  std::vector<float> x(static_cast<std::size_t>(rows * k)), out(static_cast<std::size_t>(tall * 32));
  for (float &v : x) v = r.unit();
  std::vector<char> panel(static_cast<std::size_t>(level.panel_bytes(p.matrix, tall)));
  for (int t = 0; t < rows; t++) level.panel_row(p.matrix, x.data() + t * k, panel.data(), tall, t);
  level.dense(p.matrix, 0, panel.data(), tall, rows, out.data());
  for (int t = 0; t < rows; t++)
    for (Word n = 0; n < 32; n++) {
      double sum = 0.0, size = 0.0;
      for (Word i = 0; i < k; i++) {
        const double w = p.numbers[static_cast<std::size_t>(n * k + i)], v = x[static_cast<std::size_t>(t * k + i)];
        sum += w * v;
        size += std::fabs(w);
      }
      // Inputs rounded to 8 bits are off by at most half of 1/127 of the largest, which is at most 1.
      // Rounded to bf16, each by at most 1/256 of itself.
      const double allowed = inputs == Inputs::int8   ? size / 254.0 + 1e-3
                             : inputs == Inputs::bf16 ? size / 256.0 + 1e-3
                                                      : 1e-5 * static_cast<double>(k);
      CHECK(std::fabs(sum - static_cast<double>(out[static_cast<std::size_t>(t * 32 + n)])) <= allowed);
    }
}

}  // namespace

int main() {
  const ds::Kernels *levels[4];
  const int count = ds::supported_kernels(levels, 4);
  for (int l = 0; l < count; l++)
    for (int rows = 1; rows <= 12; rows++)
      for (Word k : {8, 24, 136}) {
        products_are_right(*levels[l], Kind::f32, Inputs::f32, k, k, rows);
        products_are_right(*levels[l], Kind::bf16, Inputs::f32, k, k, rows);
        products_are_right(*levels[l], Kind::bf16, Inputs::bf16, k, k, rows);
        for (Kind kind : {Kind::int8, Kind::int4})
          for (Inputs inputs : {Inputs::f32, Inputs::int8})
            for (Word group : {Word{16}, k}) products_are_right(*levels[l], kind, inputs, k, group, rows);
      }
  return 0;
}
