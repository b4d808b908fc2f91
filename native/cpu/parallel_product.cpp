// One product of packed weights by itself.
#include <cstring>

#include "kernels/table.h"
#include "parallel.h"
#include "products.h"

namespace ds::decoder {

bool fits(const Matrix &m) {
  const bool codes = m.kind == Kind::int8 || m.kind == Kind::int4;
  if (!m.data || m.n < unit || m.n % unit || m.k < 8 || m.k % 8) return false;
  if (m.inputs == Inputs::bf16 && m.kind != Kind::bf16) return false;
  if (m.inputs == Inputs::int8 && !codes) return false;
  return !codes || (m.params && m.group >= 8 && m.group % 8 == 0);
}

namespace {

constexpr Word few_rows = 4;

Word tall_of(Word rows) { return rows <= few_rows ? rows : panel_rows; }

}  // namespace

Word product_scratch(const Matrix &m, Word rows) {
  const Word tall = tall_of(rows);
  return rows < 1 ? 0 : (rows + tall - 1) / tall * (kernels().panel_bytes(m, tall) / 4) + 16;
}

Status product(const Matrix &m, const float *x, Word rows, float *y, float *scratch, int threads) {
  if (rows < 0 || threads < 1 || !fits(m)) return Status::bad_argument;
  if (rows == 0) return Status::ok;
  if (!x || !y || !scratch) return Status::bad_argument;
  const Kernels &k = kernels();
  const Word tall = tall_of(rows), bytes = k.panel_bytes(m, tall), panels = (rows + tall - 1) / tall;
  char *base = reinterpret_cast<char *>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
  split(panels * tall, tall, threads, [&](Word begin, Word end) {
    for (Word r = begin; r < end && r < rows; r++)
      k.panel_row(m, x + r * m.k, base + r / tall * bytes, tall, r % tall);
  });
  on_threads(useful_threads(rows * m.n, threads), [&](int me, int team) {
    alignas(64) float tile[panel_rows * unit];
    const Range part = part_of(m.n / unit, 1, me, team);
    const Word block = block_panels(bytes);
    for (Word first = 0; first < panels; first += block)
      for (Word u = part.begin; u < part.end; u++)
        for (Word p = first; p < panels && p < first + block; p++) {
          const Word count = rows - p * tall < tall ? rows - p * tall : tall;
          k.dense(m, u, base + p * bytes, tall, static_cast<int>(count), tile,
                  ahead_of(m, u + 1, part.end, p - first, panels - first < block ? panels - first : block));
          for (Word i = 0; i < count; i++)
            std::memcpy(y + (p * tall + i) * m.n + u * unit, tile + i * unit, sizeof(float) * unit);
        }
  });
  return Status::ok;
}

}  // namespace ds::decoder
