// Every instruction-set level gives the same bits: updates, sums, conversions, quantizers, norms.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/table.h"

namespace {

using ds::Dtype;
using ds::Rule;

struct Problem {
  std::vector<unsigned char> p, g, a, b, copy;
  std::vector<double> partials;
};

std::vector<unsigned char> random_values(Dtype d, std::int64_t n, bool positive, Random &r) {
  std::vector<unsigned char> out(static_cast<std::size_t>(n * ds::size_of(d)));
  for (std::int64_t i = 0; i < n; i++) {
    float x = r.unit();
    if (positive && x < 0) x = -x;
    std::uint32_t u;
    std::memcpy(&u, &x, 4);
    if (d == Dtype::f32) std::memcpy(&out[static_cast<std::size_t>(i) * 4], &u, 4);
    const auto half = static_cast<std::uint16_t>(d == Dtype::bf16 ? u >> 16 : (r.bits() & (positive ? 0x3bff : 0xbbff)));
    if (d != Dtype::f32) std::memcpy(&out[static_cast<std::size_t>(i) * 2], &half, 2);
  }
  return out;
}

Problem make(Dtype pd, Dtype gd, Dtype sd, std::int64_t n) {
  Random r{static_cast<std::uint64_t>(n) * 77 + 5};
  Problem x{random_values(pd, n, false, r), random_values(gd, n, false, r), random_values(sd, n, false, r),
            random_values(sd, n, true, r), {}, {}};
  x.copy.assign(static_cast<std::size_t>(n) * 2, 0);
  x.partials.assign(static_cast<std::size_t>(2 * (n / ds::update_block + 1)), 0.0);
  return x;
}

void run(const ds::Kernels &k, Rule rule, Dtype pd, Dtype gd, Dtype sd, std::int64_t n, Problem &x) {
  const float c[ds::max_coefficients] = {0.999f, 0.01f, 0.1f, 0.99f, 0.01f, 0.003f, 0.2f, 1e-8f, 1.11f, 1.01f, 1.001f, 0.31f};
  const float ratio = 0.7f;
  const std::int64_t p = reinterpret_cast<std::int64_t>(x.p.data()), g = reinterpret_cast<std::int64_t>(x.g.data()),
                     a = reinterpret_cast<std::int64_t>(x.a.data()), b = reinterpret_cast<std::int64_t>(x.b.data()),
                     o = reinterpret_cast<std::int64_t>(x.copy.data());
  ds::Update u = {};
  u.rule = rule;
  u.zero_grad = rule == Rule::lion;
  u.grad_scale = 0.5f;
  std::memcpy(u.c, c, sizeof c);
  u.ratio = &ratio;
  u.partials = rule == Rule::lamb_moments ? x.partials.data() : nullptr;
  u.list = {1, &n, &p, &g, &a, &b, rule == Rule::lamb_moments ? nullptr : &o, pd, gd, sd, Dtype::bf16};
  k.update(u, 0, 0, n);
}

bool same(const Problem &x, const Problem &y) {
  return x.p == y.p && x.g == y.g && x.a == y.a && x.b == y.b && x.copy == y.copy &&
         !std::memcmp(x.partials.data(), y.partials.data(), x.partials.size() * sizeof(double));
}

void updates_agree(const ds::Kernels *const *levels, int num_levels) {
  const Dtype all[3] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  const std::int64_t sizes[] = {1, 3, 15, 16, 17, 2047, 2048, 2049, 5003};
  for (int rule = 0; rule <= 7; rule++)
    for (Dtype pd : all)
      for (Dtype gd : all)
        for (Dtype sd : all)
          for (std::int64_t n : sizes) {
            Problem first = make(pd, gd, sd, n);
            run(*levels[0], static_cast<Rule>(rule), pd, gd, sd, n, first);
            for (int l = 1; l < num_levels; l++) {
              Problem other = make(pd, gd, sd, n);
              run(*levels[l], static_cast<Rule>(rule), pd, gd, sd, n, other);
              if (!same(first, other))
                std::printf("rule %d, types %d %d %d, n %d, level %s\n", rule, static_cast<int>(pd),
                            static_cast<int>(gd), static_cast<int>(sd), static_cast<int>(n), levels[l]->name);
              CHECK(same(first, other));
            }
          }
}

// All 65536 values of both 16-bit types to fp32, and all 2^16 upper halves of fp32 (with two lower halves) back.
void conversions_agree(const ds::Kernels *const *levels, int num_levels) {
  std::vector<std::uint16_t> halves(65536), back(65536), other_back(65536);
  for (int i = 0; i < 65536; i++) halves[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(i);
  for (Dtype d : {Dtype::bf16, Dtype::f16}) {
    std::vector<float> wide(65536), other(65536);
    levels[0]->convert(wide.data(), Dtype::f32, halves.data(), d, 65536, 1.0f, false);
    for (int l = 1; l < num_levels; l++) {
      levels[l]->convert(other.data(), Dtype::f32, halves.data(), d, 65536, 1.0f, false);
      for (std::size_t i = 0; i < 65536; i++)
        CHECK(wide[i] != wide[i] ? other[i] != other[i] : !std::memcmp(&wide[i], &other[i], 4));
    }
    for (std::uint32_t low : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      for (std::uint32_t i = 0; i < 65536; i++) {
        const std::uint32_t u = i << 16 | low;
        std::memcpy(&wide[i], &u, 4);
      }
      levels[0]->convert(back.data(), d, wide.data(), Dtype::f32, 65536, 1.0f, false);
      for (int l = 1; l < num_levels; l++) {
        levels[l]->convert(other_back.data(), d, wide.data(), Dtype::f32, 65536, 1.0f, true);
        for (std::size_t i = 0; i < 65536; i++)
          if (wide[i] == wide[i]) CHECK(back[i] == other_back[i]);
      }
    }
  }
}

bool same(const ds::Norms &a, const ds::Norms &b) { return a.squares == b.squares && a.peak == b.peak; }

void sums_agree(const ds::Kernels *const *levels, int num_levels) {
  Random r{9};
  std::vector<float> x(ds::norm_block);
  for (float &v : x) v = r.unit();
  for (std::int64_t n : {0, 1, 5, 16, 31, 4097, static_cast<int>(ds::norm_block)}) {
    const ds::Norms want = levels[0]->measure(x.data(), Dtype::f32, n);
    double plain = 0.0, peak = 0.0;
    for (std::int64_t i = 0; i < n; i++) {
      const double v = x[static_cast<std::size_t>(i)];
      plain += v * v, peak = std::abs(v) > peak ? std::abs(v) : peak;
    }
    CHECK(want.squares <= plain * (1 + 1e-12) + 1e-300 && want.squares >= plain * (1 - 1e-12) && want.peak == peak);
    for (int l = 1; l < num_levels; l++) CHECK(same(levels[l]->measure(x.data(), Dtype::f32, n), want));
    if (n == 0) continue;
    std::vector<float> odd(x);
    for (float special : {-INFINITY, NAN}) {
      odd[static_cast<std::size_t>(n - 1)] = special;
      for (int l = 0; l < num_levels; l++) {
        const ds::Norms found = levels[l]->measure(odd.data(), Dtype::f32, n);
        CHECK(special == special ? found.peak == INFINITY && found.squares == INFINITY : found.peak != found.peak && found.squares != found.squares);
      }
    }
  }
}

// Sums of two and of three sources, in every type, written past the cache or not.
void sources_agree(const ds::Kernels *const *levels, int num_levels) {
  Random r{17};
  for (Dtype d : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (std::int64_t n : {1, 15, 16, 17, 511, 512, 513, 4096, 5003}) {
      const auto a = random_values(d, n, false, r), b = random_values(d, n, false, r), c = random_values(d, n, false, r);
      const void *src[] = {a.data(), b.data(), c.data()};
      for (int count : {1, 2, 3}) {
        std::vector<unsigned char> first(a.size() + 64), other(first.size());
        auto *to = first.data() + (-reinterpret_cast<std::intptr_t>(first.data()) & 63);
        const ds::Norms want = levels[0]->sum_sources(to, src, count, d, 0, n, false);
        for (int l = 0; l < num_levels; l++) {
          auto *again = other.data() + (-reinterpret_cast<std::intptr_t>(other.data()) & 63);
          CHECK(same(levels[l]->sum_sources(again, src, count, d, 0, n, true), want));
          CHECK(!std::memcmp(to, again, a.size()));
        }
        CHECK(same(levels[num_levels - 1]->measure(to, d, n), want));
      }
    }
}

// Codes, parameters and values of every format, also stochastic, also where the counter of draws crosses 32 bits.
void quantizers_agree(const ds::Kernels *const *levels, int num_levels) {
  const ds::QuantFormat formats[] = {{8, -1, 0, 127, 127.0f},   {4, -1, 0, 7, 7.0f},     {8, 3, 7, 0x7e, 448.0f},
                                     {8, 2, 15, 0x7b, 57344.0f}, {6, 2, 3, 0x1f, 28.0f}, {6, 3, 1, 0x1f, 7.5f},
                                     {4, 1, 1, 7, 6.0f}};
  Random r{31};
  std::vector<float> x(700), back(700), other_back(700);
  for (float &v : x) v = r.unit() * 1e3f;
  for (const ds::QuantFormat &f : formats)
    for (int variant = 0; variant < 4; variant++)
      for (std::int64_t n : {1, 4, 15, 16, 17, 511, 512, 700}) {
        ds::QuantSpec s = {f, variant % 2 == 0, variant / 2 == 1, {123u, 456u}, (1ll << 32) - 50, 700};
        if (f.mantissa >= 0 && !s.symmetric) continue;
        std::vector<unsigned char> row(712), other(712);
        float *params = reinterpret_cast<float *>(row.data() + 704), *other_params = reinterpret_cast<float *>(other.data() + 704);
        levels[0]->quantize_group(s, row.data(), params, x.data(), Dtype::f32, n, s.offset);
        levels[0]->dequantize_groups(s, {row.data(), 1, 0, 704, false}, 0, 0.5f, back.data(), Dtype::f32, n);
        for (int l = 1; l < num_levels; l++) {
          levels[l]->quantize_group(s, other.data(), other_params, x.data(), Dtype::f32, n, s.offset);
          levels[l]->dequantize_groups(s, {other.data(), 1, 0, 704, true}, 0, 0.5f, other_back.data(), Dtype::f32, n);
          CHECK(row == other);
          CHECK(!std::memcmp(back.data(), other_back.data(), static_cast<std::size_t>(n) * 4));
        }
      }
}

// Sums of runs of groups of several rows, written past the cache, aligned or not, on every level: as in the cache.
void runs_agree(const ds::Kernels *const *levels, int num_levels) {
  const ds::QuantFormat formats[] = {{8, -1, 0, 127, 127.0f}, {4, -1, 0, 7, 7.0f}, {6, 2, 3, 0x1f, 28.0f}};
  constexpr std::int64_t params_at = 1600, row_bytes = params_at + 4 * 2 * 100;
  Random r{77};
  for (const ds::QuantFormat &f : formats)
    for (std::int64_t group : {16, 40, 256, 1024})
      for (std::int64_t count : {1, 3, 9})
        for (Dtype d : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
          const ds::QuantSpec s = {f, f.bits != 4, false, {0u, 0u}, 0, group};
          const std::int64_t n = 1600 - 3, width = f.bits;
          std::vector<unsigned char> rows(static_cast<std::size_t>(count * row_bytes));
          for (std::int64_t k = 0; k < count; k++)
            for (std::int64_t i = 0; i < n; i += group) {
              std::vector<float> x(static_cast<std::size_t>(n - i < group ? n - i : group));
              for (float &v : x) v = r.unit();
              unsigned char *row = rows.data() + k * row_bytes;
              float *params = reinterpret_cast<float *>(row + params_at) + i / group * ds::quant_params(s);
              levels[0]->quantize_group(s, row + i * width / 8, params, x.data(), Dtype::f32, static_cast<std::int64_t>(x.size()), i);
            }
          std::vector<unsigned char> want(static_cast<std::size_t>(n * ds::size_of(d))), got(want.size() + 128);
          levels[0]->dequantize_groups(s, {rows.data(), count, row_bytes, params_at, false}, 0, 0.25f, want.data(), d, n);
          for (int l = 0; l < num_levels; l++)
            for (std::int64_t off : {std::int64_t{0}, ds::size_of(d)}) {
              unsigned char *to = got.data() + (-reinterpret_cast<std::intptr_t>(got.data()) & 63) + off;
              levels[l]->dequantize_groups(s, {rows.data(), count, row_bytes, params_at, true}, 0, 0.25f, to, d, n);
              CHECK(!std::memcmp(want.data(), to, want.size()));
            }
        }
}

// Rows of RMS norm with a residual, and their gradients.
void norms_agree(const ds::Kernels *const *levels, int num_levels) {
  Random r{5};
  constexpr std::int64_t rows = 3, most = 1100;
  std::vector<float> x(rows * most), residual(x.size()), weight(most), scratch(2 * most);
  for (auto *v : {&x, &residual, &weight})
    for (float &e : *v) e = r.unit();
  for (std::int64_t cols : {1, 3, 16, 17, 63, 64, 65, 511, 512, 513, 1100}) {
    std::vector<float> first;
    for (int l = 0; l < num_levels; l++) {
      std::vector<float> out(static_cast<std::size_t>(3 * rows * cols + rows + cols));  // sum, y, dx, rstd, dweight
      float *sum = out.data(), *y = sum + rows * cols, *dx = y + rows * cols, *rstd = dx + rows * cols;
      ds::Norm n = {1e-6, rows, cols, Dtype::f32, x.data(), residual.data(), weight.data(), sum, y, rstd};
      levels[l]->norm_rows(n, 0, rows, scratch.data());
      ds::NormGrad g = {rows, cols, Dtype::f32, sum, y, x.data(), weight.data(), rstd, dx, rstd + rows};
      levels[l]->norm_grad_rows(g, 0, rows, 0, scratch.data());
      if (l == 0) first = out;
      CHECK(!std::memcmp(first.data(), out.data(), out.size() * sizeof(float)));
    }
  }
}

void rows_agree(const ds::Kernels *const *levels, int count) {
  const std::int64_t index[] = {4, 0, 2, 2, 1, 3, 3, 4};
  for (Dtype d : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (std::int64_t cols : {1, 15, 16, 17, 130}) {
      Random r{static_cast<std::uint64_t>(cols)};
      const auto x = random_values(d, 5 * cols, false, r);
      const float weights[] = {0.3f, -1.7f, 0.1f, 2.2f, 0.9f, 1e-3f, -0.4f, 1.0f};
      const auto bytes = static_cast<std::size_t>(cols * ds::size_of(d));
      std::vector<std::vector<unsigned char>> sums, picked;
      for (int l = 0; l < count; l++) {
        sums.emplace_back(4 * bytes), picked.emplace_back(8 * bytes);
        levels[l]->sum_rows(sums.back().data(), x.data(), d, cols, index, weights, 2, 0, 4);
        levels[l]->gather_rows(picked.back().data(), x.data(), static_cast<std::int64_t>(bytes), index, 1, 0, 8, false);
        CHECK(sums.back() == sums.front() && picked.back() == picked.front());
      }
    }
}

}  // namespace

int main() {
  const ds::Kernels *levels[4];
  const int n = ds::supported_kernels(levels, 4);
  CHECK(n >= 1);
  updates_agree(levels, n);
  conversions_agree(levels, n);
  sources_agree(levels, n);
  sums_agree(levels, n);
  quantizers_agree(levels, n);
  runs_agree(levels, n);
  norms_agree(levels, n);
  rows_agree(levels, n);
  std::printf("%d levels agree\n", n);
}
